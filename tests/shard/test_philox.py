"""Philox against the answers that its authors published, and the uniforms made of it."""

import pytest
import torch

from shard.philox import philox4x32, uniform

ONES = 0xFFFFFFFF
# Random123, kat_vectors, "philox4x32 10".
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    result = philox4x32(torch.tensor([counter]).T, torch.tensor([key]).T)
    assert tuple(result.flatten().tolist()) == expected


def test_columns_are_independent() -> None:
    counters, keys, expected = (torch.tensor(column).T for column in zip(*KNOWN, strict=True))
    assert torch.equal(philox4x32(counters, keys), expected)


def test_uniform_is_53_bits_of_the_first_two_words() -> None:
    zero = torch.zeros(1, dtype=torch.int64)
    bits = (0x6627E8D5 << 32 | 0xE169C58D) >> 11
    assert uniform(zero, zero, zero).item() == bits / 2**53
    # Key: low half, then high half; counter: position, then output index. From Python's own arithmetic.
    seed, output_index, position = 0x299F31D0_A4093822, 0x85A308D3, 0x243F6A88
    high, low = _philox((position, output_index, 0, 0), (seed & ONES, seed >> 32))[:2]
    drawn = uniform(torch.tensor([seed]), torch.tensor([output_index]), torch.tensor([position]))
    assert drawn.item() == ((high << 32 | low) >> 11) / 2**53


def _philox(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    a, b, c, d = counter
    for turn in range(10):
        first, second = a * 0xD2511F53, c * 0xCD9E8D57
        keys = [(k + turn * step) & ONES for k, step in zip(key, (0x9E3779B9, 0xBB67AE85), strict=True)]
        a, b, c, d = second >> 32 ^ b ^ keys[0], second & ONES, first >> 32 ^ d ^ keys[1], first & ONES
    return a, b, c, d


def test_every_argument_counts_and_nothing_else_does() -> None:
    seeds = torch.tensor([5, 6, 5, 5, 5, -1, -(2**63)])
    outputs = torch.tensor([0, 0, 1, 0, 0, 0, 0])
    positions = torch.tensor([0, 0, 0, 1, 0, 0, 0])
    drawn = uniform(seeds, outputs, positions).tolist()
    assert drawn[0] == drawn[4]
    assert len(set(drawn)) == len(drawn) - 1
    assert uniform(seeds[2:4], outputs[2:4], positions[2:4]).tolist() == drawn[2:4]


def test_uniforms_fill_the_unit_interval_evenly() -> None:
    count = 20_000
    drawn = uniform(torch.full((count,), 7), torch.zeros(count, dtype=torch.int64), torch.arange(count))
    assert drawn.dtype == torch.float64
    assert bool(((drawn >= 0) & (drawn < 1)).all())
    assert (drawn.sort().values - torch.arange(count) / count).abs().max() < 1.6 / count**0.5
