"""What one step's attention reads besides queries and caches."""

from collections.abc import Sequence
from dataclasses import dataclass

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
    """`seq_lens` on the host."""

    @classmethod
    def build(
        cls, block_tables: Tensor, query_lens: Sequence[int], seq_lens: Sequence[int], block_size: int
    ) -> "AttentionBatch":
        """Derives the flat layout from block tables (`[num_seqs, max_blocks]` int32) and lengths in tokens.

        Everything lands on the device of `block_tables`. The caller vouches for `query_lens[i]` at most
        `seq_lens[i]` and for tables that cover `seq_lens`.
        """
        queries = torch.tensor(query_lens, dtype=torch.int64)
        lens = torch.tensor(seq_lens, dtype=torch.int64)
        ends = queries.cumsum(0)
        sequence = torch.repeat_interleave(queries)
        positions = torch.arange(len(sequence)) + (lens - ends)[sequence]

        device = block_tables.device
        positions, sequence = positions.to(device), sequence.to(device)
        blocks = block_tables[sequence, positions // block_size].long()
        return cls(
            positions=positions,
            owners=sequence,
            slot_mapping=blocks * block_size + positions % block_size,
            block_tables=block_tables,
            query_start=torch.cat((ends.new_zeros(1), ends)).to(device, torch.int32),
            seq_lens=lens.to(device, torch.int32),
            query_lens=tuple(query_lens),
            host_seq_lens=tuple(seq_lens),
        )
