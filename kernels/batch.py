"""What one step's attention reads besides queries and caches."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class AttentionBatch:
    """A mixed batch of prefill chunks and decode tokens in flat layout: sequence after sequence, no padding.

    The tokens of a sequence in this step are always the last `query_lens[i]` of its `seq_lens[i]` tokens.
    Tensors share one device; tuples are on the host, so that nothing waits for the device to learn a shape.
    """

    positions: Tensor
    """`[num_tokens]` int64: each token's absolute position in its sequence, from 0."""
    owners: Tensor
    """`[num_tokens]` int64: which sequence of the batch each token belongs to."""
    slot_mapping: Tensor
    """`[num_tokens]` int64: where each token's K and V go, `physical block * block_size + offset`."""
    block_tables: Tensor
    """`[num_seqs, max_blocks]` int32: physical block of each logical block. Entries past a sequence's last
    block may hold anything: they are never read through."""
    query_start: Tensor
    """`[num_seqs + 1]` int32: sequence `i` owns tokens `query_start[i]` up to `query_start[i + 1]`."""
    seq_lens: Tensor
    """`[num_seqs]` int32: tokens in the cache once this step has written its own."""
    query_lens: tuple[int, ...]
    """Tokens computed in this step, per sequence."""
    host_seq_lens: tuple[int, ...]
    """`seq_lens` on the host, or in a step that is captured once for all lengths their upper bounds."""

    @classmethod
    def build(
        cls, block_tables: Tensor, query_lens: Sequence[int], seq_lens: Sequence[int], block_size: int
    ) -> "AttentionBatch":
        """Derives the flat layout from block tables (`[num_seqs, max_blocks]` int32) and lengths in tokens.

        Everything lands on the device of `block_tables`, in one copy that isn't waited for. The caller
        vouches for `query_lens[i]` at most `seq_lens[i]` and for tables that cover `seq_lens`.
        """
        queries, lens = np.array(query_lens, dtype=np.int64), np.array(seq_lens, dtype=np.int64)
        starts = np.zeros(len(queries) + 1, dtype=np.int64)
        np.cumsum(queries, out=starts[1:])
        owners = np.arange(len(queries)).repeat(queries)
        positions = np.arange(len(owners)) + (lens - starts[1:])[owners]
        on_device = _to_device((positions, owners, starts, lens), block_tables.device)
        positions_there, owners_there, starts_there, lens_there = on_device
        logical = torch.div(positions_there, block_size, rounding_mode="floor")
        return cls(
            positions=positions_there,
            owners=owners_there,
            slot_mapping=_slots(block_tables[owners_there, logical], positions_there, logical, block_size),
            block_tables=block_tables,
            query_start=starts_there.int(),
            seq_lens=lens_there.int(),
            query_lens=tuple(query_lens),
            host_seq_lens=tuple(seq_lens),
        )

    @classmethod
    def of_decodes(
        cls, block_tables: Tensor, seq_lens: Tensor, block_size: int, host_seq_lens: Sequence[int]
    ) -> "AttentionBatch":
        """One token of each sequence, derived on the device alone, so that a CUDA graph can hold it.

        `seq_lens`: `[num_seqs]` int64, where 0 is padding: its token has position 0, and no slot.
        `host_seq_lens` are these or, under capture, bounds above all that the graph is to be replayed with.
        """
        num_seqs = seq_lens.numel()
        query_start = torch.arange(num_seqs + 1, dtype=torch.int32, device=seq_lens.device)
        positions = (seq_lens - 1).clamp_(min=0)
        logical = torch.div(positions, block_size, rounding_mode="floor")
        blocks = block_tables.gather(1, logical.unsqueeze(1)).squeeze(1)
        return cls(
            positions=positions,
            owners=torch.arange(num_seqs, device=seq_lens.device),
            slot_mapping=_slots(blocks, positions, logical, block_size).masked_fill_(seq_lens == 0, -1),
            block_tables=block_tables,
            query_start=query_start,
            seq_lens=seq_lens.int(),
            query_lens=(1,) * num_seqs,
            host_seq_lens=tuple(host_seq_lens),
        )


def _slots(blocks: Tensor, positions: Tensor, logical: Tensor, block_size: int) -> Tensor:
    """Where tokens go that lie in these physical blocks: `block * block_size + position % block_size`."""
    return positions.add(blocks.long().sub_(logical), alpha=block_size)


def _to_device(arrays: Sequence[np.ndarray], device: torch.device) -> Sequence[Tensor]:
    """From pageable memory a copy to a GPU would be waited for."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    packed = torch.from_numpy(np.concatenate(arrays)).pin_memory().to(device, non_blocking=True)
    return packed.split_with_sizes([len(array) for array in arrays])
