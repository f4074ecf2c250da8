"""Log-probabilities of a prompt's tokens, each after those before it."""

from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from shard.download import Download
from shard.logprobs import RowLogprobs, log_probabilities
from shard.slots import PromptChunk

# Rows of logits at a time: a step may hold thousands, each as wide as the vocabulary.
_ROWS: Final = 64


class PromptToken(NamedTuple):
    """A token of a prompt, and what the model gave it."""

    token_id: int
    logprobs: RowLogprobs


class PromptLogprobs:
    """Those of some chunks. The copy to the host is on its way; `fetch` waits for it and for nothing else."""

    def __init__(
        self,
        chunks: Sequence[PromptChunk],
        token_ids: Tensor,
        hidden: Tensor,
        compute_logits: Callable[[Tensor], Tensor],
    ) -> None:
        """`token_ids`: all slots' `[slots, length]`. `hidden`: the step's, `[num_tokens, hidden_size]`.

        `compute_logits` takes some rows of that to float32 `[rows, vocab]`.
        """
        tables = []
        for chunk in chunks:
            tokens = token_ids[chunk.slot, chunk.position : chunk.position + chunk.count].long()
            rows = hidden[chunk.row : chunk.row + chunk.count]
            parts = [
                log_probabilities(
                    compute_logits(rows[start : start + _ROWS]), tokens[start : start + _ROWS], chunk.width
                )
                for start in range(0, chunk.count, _ROWS)
            ]
            tables.append(torch.cat((tokens.double().unsqueeze(-1), torch.cat(parts)), dim=-1))
        self._chunks = chunks
        self._widths = [table.shape[-1] for table in tables]
        self._download = Download(torch.cat([table.flatten() for table in tables]))

    def fetch(self) -> Iterator[tuple[int, list[PromptToken]]]:
        """Slots, in the order of the chunks, and the tokens that became known of each."""
        numbers, start = self._download.fetch(), 0
        for chunk, width in zip(self._chunks, self._widths, strict=True):
            end = start + chunk.count * width
            rows = [numbers[first : first + width] for first in range(start, end, width)]
            yield chunk.slot, [PromptToken(int(row[0]), RowLogprobs.unpack(row[1:])) for row in rows]
            start = end
