"""Philox4x32-10, a counter-based random generator: each draw is a function of its key and its counter.

Source: Salmon et al., *Parallel Random Numbers: As Easy as 1, 2, 3* (SC 2011), section 3.3, and Random123.
"""

import torch
from torch import Tensor

ROUNDS = 10
_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


def philox4x32(counter: Tensor, key: Tensor) -> Tensor:
    """Encrypts `counter` [4, n] with `key` [2, n]: int64 words of 32 bits, as is the result, [4, n]."""
    multipliers = torch.tensor(_MULTIPLIERS, device=counter.device).unsqueeze(-1)
    key_steps = torch.tensor(_KEY_STEPS, device=counter.device).unsqueeze(-1)
    even, odd = counter[0::2], counter[1::2]
    for turn in range(ROUNDS):
        # Wraps modulo 2**64, which leaves the bits of the unsigned product right.
        product = even * multipliers
        high, low = product >> 32 & _WORD, product & _WORD
        even = high.flip(0) ^ odd ^ (key + turn * key_steps & _WORD)
        odd = low.flip(0)
    return torch.stack((even, odd), dim=1).flatten(0, 1)


def uniform(seed: Tensor, output_index: Tensor, position: Tensor) -> Tensor:
    """One float64 per row, [n] in [0, 1), made of 53 random bits.

    `seed`: int64 [n] that holds the bits of a uint64; `output_index` and `position`: int64 [n], of which the
    low 32 bits count. Key = (low half, high half of the seed); counter = (position, output index, 0, 0).
    """
    key = torch.stack((seed & _WORD, seed >> 32 & _WORD))
    nought = torch.zeros_like(position)
    counter = torch.stack((position & _WORD, output_index & _WORD, nought, nought))
    high, low = philox4x32(counter, key)[:2]
    bits: Tensor = high << 21 | low >> 11
    return bits.double() * 2.0**-53
