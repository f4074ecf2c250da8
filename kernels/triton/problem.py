"""What the attention kernels are told, in the order in which all of them take it."""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from kernels.batch import AttentionBatch
from kernels.triton import fp8
from kernels.triton.tuning import AttentionConfig, Kind, attention_config

MAX_HEAD_DIM: Final = 256
# Triton compiles anew for an argument that becomes 1 or a multiple of 16. Not for these, which change from
# step to step: a request would wait for it.
VARYING: Final = ["table_stride"]
UNALIGNED: Final = ["block_tables", "query_start", "seq_lens"]
# Rows of a matrix instruction are summed in steps of 16 elements.
MIN_BLOCK_D: Final = 16


@dataclass(frozen=True, eq=False)
class AttentionProblem:
    """One call of `paged_attention`, checked: its tensors, and the numbers that follow from them."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    output: Tensor
    batch: AttentionBatch
    scale: float
    value_scale: float
    sliding_window: int | None
    soft_cap: float | None
    fp8: int
    """How the caches are read: see `kernels.triton.fp8`."""

    @classmethod
    def of(
        cls,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        batch: AttentionBatch,
        scale: float,
        value_scale: float,
        sliding_window: int | None,
        soft_cap: float | None,
    ) -> "AttentionProblem":
        """`scale` includes that of an FP8 `key_cache`. Raises `ValueError` as `paged_attention` says."""
        block_size, _, head_dim = key_cache.shape[1:]
        if block_size % 8:
            raise ValueError(f"block_size is {block_size}: the GPU kernels need a multiple of 8")
        if head_dim > MAX_HEAD_DIM:
            raise ValueError(f"head_dim is {head_dim}: the GPU kernels go up to {MAX_HEAD_DIM}")
        if not (key_cache.is_contiguous() and value_cache.is_contiguous()):
            raise ValueError("the caches aren't contiguous: slots can't be numbered")
        if query.stride(-1) != 1:
            query = query.contiguous()
        key_cache, mode = fp8.readable(key_cache)
        value_cache, _ = fp8.readable(value_cache)
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        return cls(
            query, key_cache, value_cache, output, batch, scale, value_scale, sliding_window, soft_cap, mode
        )

    @property
    def num_heads(self) -> int:
        return self.query.shape[1]

    @property
    def num_kv_heads(self) -> int:
        return self.key_cache.shape[2]

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.query.shape[2]

    @property
    def block_d(self) -> int:
        return max(MIN_BLOCK_D, 1 << (self.head_dim - 1).bit_length())

    def config(self, kind: Kind) -> AttentionConfig:
        """Tiles for the current GPU."""
        return attention_config(kind, self.head_dim, self.key_cache.dtype.itemsize)

    def tensors(self) -> tuple[Tensor, ...]:
        batch = self.batch
        tables = batch.block_tables if batch.block_tables.stride(-1) == 1 else batch.block_tables.contiguous()
        return (
            self.query,
            self.key_cache,
            self.value_cache,
            self.output,
            tables,
            batch.query_start,
            batch.seq_lens,
        )

    def numbers(self) -> tuple[float, ...]:
        tables = self.batch.block_tables
        return (
            self.query.stride(0),
            self.query.stride(1),
            self.num_kv_heads * self.head_dim,
            tables.stride(0) if tables.stride(-1) == 1 else tables.shape[1],
            float(self.scale),
            float(self.value_scale),
            float(self.soft_cap or 0),
            self.sliding_window or 0,
        )

    def constants(self) -> dict[str, int | bool | str]:
        return {
            "GROUP": self.group,
            "NUM_HEADS": self.num_heads,
            "BLOCK_SIZE": self.key_cache.shape[1],
            "HEAD_DIM": self.head_dim,
            "BLOCK_D": self.block_d,
            "HAS_WINDOW": self.sliding_window is not None,
            "HAS_SOFT_CAP": self.soft_cap is not None,
            "FP8": self.fp8,
            # Tensor cores would round float32 to 10 bits of mantissa.
            "PRECISION": "ieee" if self.query.dtype == torch.float32 else "tf32",
        }
