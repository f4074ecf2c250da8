"""Log-probabilities of tokens, from raw logits: before penalties, biases and temperature."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RowLogprobs:
    """Natural logarithms of probabilities, from one row of logits."""

    chosen: float
    top: list[tuple[int, float]]
    """(token id, log-probability): the likeliest first, ties by token id."""

    @classmethod
    def unpack(cls, packed: Sequence[float], count: int | None = None) -> "RowLogprobs":
        """A row of `log_probabilities`, with `count` of its likeliest tokens, or all."""
        chosen, *top = packed
        width = len(top) // 2
        return cls(chosen, [*zip(map(int, top[:width]), top[width:], strict=True)][:count])


def log_probabilities(logits: Tensor, token_ids: Tensor, width: int) -> Tensor:
    """Of one token per row of float32 `[rows, vocab]`, `token_ids` int64 `[rows]`, and of the likeliest ones.

    Returns float64 `[rows, 1 + 2 * width]`, with at most vocab for `width`: the token's, then the ids of the
    likeliest, then theirs.
    """
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(-1, token_ids.unsqueeze(-1))
    vocab = logits.shape[-1]
    width = min(width, vocab)
    if not width:
        return chosen.double()
    ordered = logprobs.topk(width).values
    kept = greatest(logprobs, ordered, torch.full_like(token_ids, width).unsqueeze(-1))
    ids = torch.where(kept, torch.arange(vocab, device=logits.device), vocab)
    ids = ids.topk(width, largest=False, sorted=True).values.clamp_(max=vocab - 1)
    ranks = logprobs.gather(-1, ids).sort(dim=-1, descending=True, stable=True).indices
    ids = ids.gather(-1, ranks)
    return torch.cat((chosen.double(), ids.double(), logprobs.gather(-1, ids).double()), dim=-1)


def greatest(scores: Tensor, ordered: Tensor, count: Tensor) -> Tensor:
    """Which are the `count` `[t, 1]` greatest of `scores`, as bool `[t, vocab]`; of equals, the lowest ids.

    `ordered`: the greatest of each row in order, as many as the largest count.
    """
    border = ordered.gather(-1, count - 1)
    spare = count - (ordered > border).sum(-1, keepdim=True)
    tied = scores == border
    return (scores > border) | (tied & (tied.cumsum(-1, dtype=torch.int32) <= spare))
