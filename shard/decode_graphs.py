"""Decode steps as CUDA graphs: a few batch sizes are captured at warm-up, a step takes the next larger one.

A graph holds everything from the look-up of token ids to the logits, and derives all that it needs from two
numbers per sequence, its slot and its length. Rows beyond the batch are padding: sequences of length 0.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import torch
from torch import Tensor

MAX_SEQS: Final = 256
"""Larger steps run eagerly: they take so long on the device that the host keeps ahead of it."""
# Above any length that is served, for kernels that size their launches by it.
UNBOUNDED: Final = 1 << 20

Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Takes work whose tensors stay where they are; returns what does it again, on what they then hold."""


class Decode(Protocol):
    """Computes one token of each sequence."""

    def __call__(self, slots: Tensor, seq_lens: Tensor, host_seq_lens: Sequence[int]) -> Tensor:
        """`slots`, `seq_lens`: `[num_seqs]` int64. Returns float32 `[num_seqs, vocab_size]`.

        See `AttentionBatch.of_decodes` for `host_seq_lens`.
        """


def batch_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, every multiple of 8 below the limit, and the limit: 35 sizes at most.

    So no step of 8 sequences or more computes over 7 rows in vain.
    """
    limit = min(max_num_seqs, MAX_SEQS)
    return [size for size in (1, 2, 4, *range(8, limit, 8)) if size < limit] + [limit]


class DecodeGraphs:
    """One graph per batch size, all on the same tensors."""

    def __init__(
        self,
        decode: Decode,
        inputs: Tensor,
        sizes: Sequence[int],
        vocab_size: int,
        capture: Capture,
        progress: Callable[[], None],
    ) -> None:
        """Captures each of `sizes`, ascending; `progress` is called after each.

        `inputs`: int64, and zeros at first. A batch padded to `size` has its slots in the first `size` of
        them, and its lengths in the next.
        """
        self._sizes = sizes
        self._logits = torch.empty(sizes[-1], vocab_size, device=inputs.device)
        # Of the step at hand. Only work that isn't captured sees other values than these.
        self._host_seq_lens: Sequence[int] = ()
        self._replay: dict[int, Callable[[], None]] = {}

        def work(size: int) -> Callable[[], None]:
            slots, seq_lens, logits = inputs[:size], inputs[size : 2 * size], self._logits[:size]

            def run() -> None:
                logits.copy_(decode(slots, seq_lens, self._host_seq_lens))

            return run

        # The largest first, so that the others find their memory in the pool.
        for size in reversed(sizes):
            self._host_seq_lens = [UNBOUNDED] * size
            self._replay[size] = capture(work(size))
            progress()

    def padded_size(self, num_seqs: int) -> int | None:
        """The batch size to pad to; None if there are more sequences than any graph has."""
        index = bisect_left(self._sizes, num_seqs)
        return self._sizes[index] if index < len(self._sizes) else None

    def replay(self, host_seq_lens: Sequence[int]) -> Tensor:
        """Computes what `inputs` holds: as many sequences as there are lengths, which are one of the sizes.

        Returns float32 logits `[num_seqs, vocab_size]`, good until the next call.
        """
        self._host_seq_lens = host_seq_lens
        self._replay[len(host_seq_lens)]()
        return self._logits[: len(host_seq_lens)]


class CudaCapture:
    """Captures work as CUDA graphs that share one pool of memory: of several, one may run at a time."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        # Once before, as kernels are compiled and libraries set up by their first call, which is no work for
        # a graph. On the same stream: libraries keep workspace for each.
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            work()
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile.
        with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
            work()
        return graph.replay
