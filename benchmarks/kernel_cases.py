"""The table of what `benchmarks.kernels` measures: operations of `kernels` on the shapes that steps have.

To add one, write a function from a `Shape` to a `Prepared` and list it in `CASES`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from kernels import AttentionBatch

BLOCK_SIZE: Final = 16


@dataclass(frozen=True)
class Shape:
    """Sizes of a model in elements, and where and how large a case is."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    # Of the cases' sequences and contexts; less than 1 in quick runs.
    scale: float = 1.0

    def count(self, full: int) -> int:
        """A number of sequences or tokens, scaled."""
        return max(round(full * self.scale), 2)

    def tensor(self, *size: int) -> Tensor:
        """Random values."""
        return torch.randn(size, device=self.device).to(self.dtype)


@dataclass(frozen=True)
class Prepared:
    """Arguments of one call, and what it can't but do.

    `num_bytes` counts each input and output once. `written` are the arguments that it writes in place, for
    operations that return nothing.
    """

    operation: str
    arguments: tuple[Any, ...]
    num_bytes: int
    num_flops: int = 0
    written: tuple[int, ...] = field(default=())


@dataclass(frozen=True)
class Case:
    """A row of the table."""

    name: str
    prepare: Callable[[Shape], Prepared]


def _size(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _rms_norm(tokens: int) -> Callable[[Shape], Prepared]:
    def prepare(shape: Shape) -> Prepared:
        x, weight = shape.tensor(tokens, shape.hidden_size), shape.tensor(shape.hidden_size)
        return Prepared("rms_norm", (x, weight, 1e-5), 2 * _size(x) + _size(weight))

    return prepare


def _silu_and_mul(tokens: int) -> Callable[[Shape], Prepared]:
    def prepare(shape: Shape) -> Prepared:
        gate_up = shape.tensor(tokens, 2 * shape.intermediate_size)
        return Prepared("silu_and_mul", (gate_up,), _size(gate_up) * 3 // 2)

    return prepare


def _rotary(tokens: int) -> Callable[[Shape], Prepared]:
    def prepare(shape: Shape) -> Prepared:
        query = shape.tensor(tokens, shape.num_heads, shape.head_dim)
        key = shape.tensor(tokens, shape.num_kv_heads, shape.head_dim)
        cos, sin = shape.tensor(tokens, shape.head_dim // 2), shape.tensor(tokens, shape.head_dim // 2)
        return Prepared("rotary_embedding", (query, key, cos, sin), 2 * _size(query, key) + _size(cos, sin))

    return prepare


def _caches(shape: Shape, num_blocks: int) -> tuple[Tensor, Tensor]:
    size = (num_blocks, BLOCK_SIZE, shape.num_kv_heads, shape.head_dim)
    return shape.tensor(*size), shape.tensor(*size)


def _write_kv(tokens: int) -> Callable[[Shape], Prepared]:
    def prepare(shape: Shape) -> Prepared:
        key, value = (shape.tensor(tokens, shape.num_kv_heads, shape.head_dim) for _ in range(2))
        caches = _caches(shape, 4 * tokens // BLOCK_SIZE + 1)
        slots = torch.randperm(caches[0].shape[0] * BLOCK_SIZE, device=shape.device)[:tokens]
        return Prepared("write_kv", (key, value, *caches, slots), 2 * _size(key, value), written=(2, 3))

    return prepare


def _copy_blocks(blocks: int) -> Callable[[Shape], Prepared]:
    def prepare(shape: Shape) -> Prepared:
        count = shape.count(blocks)
        layers = [_caches(shape, 4 * count) for _ in range(4)]
        order = torch.randperm(4 * count).tolist()
        moved = 2 * 2 * len(layers) * count * _size(layers[0][0][0])
        arguments = (layers, layers, order[:count], order[count : 2 * count])
        return Prepared("copy_blocks", arguments, moved, written=(1,))

    return prepare


def _attention(sequences: Sequence[tuple[int, int, int]]) -> Callable[[Shape], Prepared]:
    """`sequences`: how many of them, with how many tokens to compute, of how many in all."""

    def prepare(shape: Shape) -> Prepared:
        queries: list[int] = []
        lengths: list[int] = []
        for count, query, length in sequences:
            count = shape.count(count) if count > 1 else 1
            query = shape.count(query) if query > 1 else 1
            queries += [query] * count
            lengths += [max(shape.count(length), query)] * count
        blocks = [-(-length // BLOCK_SIZE) for length in lengths]
        caches = _caches(shape, sum(blocks))
        order = torch.randperm(sum(blocks)).to(torch.int32)
        tables = torch.zeros(len(blocks), max(blocks), dtype=torch.int32)
        for row, part in enumerate(torch.split(order, blocks)):
            tables[row, : len(part)] = part
        batch = AttentionBatch.build(tables.to(shape.device), queries, lengths, BLOCK_SIZE)
        query_tensor = shape.tensor(sum(queries), shape.num_heads, shape.head_dim)
        per_token = 2 * shape.num_kv_heads * shape.head_dim * shape.dtype.itemsize
        # Token by token: those that it sees, itself included.
        seen = sum(q * length - q * (q - 1) // 2 for q, length in zip(queries, lengths, strict=True))
        return Prepared(
            "paged_attention",
            (query_tensor, *caches, batch, shape.head_dim**-0.5),
            2 * _size(query_tensor) + sum(lengths) * per_token,
            4 * seen * shape.num_heads * shape.head_dim,
        )

    return prepare


CASES: Final = (
    Case("rms_norm, 64 tokens", _rms_norm(64)),
    Case("rms_norm, 256 tokens", _rms_norm(256)),
    Case("rotary_embedding, 64 tokens", _rotary(64)),
    Case("rotary_embedding, 256 tokens", _rotary(256)),
    Case("silu_and_mul, 64 tokens", _silu_and_mul(64)),
    Case("silu_and_mul, 256 tokens", _silu_and_mul(256)),
    Case("write_kv, 64 tokens", _write_kv(64)),
    Case("write_kv, 256 tokens", _write_kv(256)),
    Case("copy_blocks, 64 blocks of 4 layers", _copy_blocks(64)),
    Case("paged_attention, 1 decode at 4,096 tokens", _attention([(1, 1, 4096)])),
    Case("paged_attention, 64 decodes at 256 tokens", _attention([(64, 1, 256)])),
    Case("paged_attention, 64 decodes at 1,024 tokens", _attention([(64, 1, 1024)])),
    Case("paged_attention, 256 of a prompt's 256 tokens", _attention([(1, 256, 256)])),
    Case("paged_attention, 256 of a prompt's 4,096 tokens", _attention([(1, 256, 4096)])),
    Case("paged_attention, 32 decodes beside 224 of a prompt", _attention([(32, 1, 512), (1, 224, 1024)])),
)
# Too large for a CPU, and enough to fill a GPU.
GPU_CASES: Final = (
    Case("paged_attention, 256 decodes at 2,048 tokens", _attention([(256, 1, 2048)])),
    Case("paged_attention, 4,096 of a prompt's 4,096 tokens", _attention([(1, 4096, 4096)])),
    Case("rms_norm, 4,096 tokens", _rms_norm(4096)),
    Case("rotary_embedding, 4,096 tokens", _rotary(4096)),
    Case("silu_and_mul, 4,096 tokens", _silu_and_mul(4096)),
    Case("write_kv, 4,096 tokens", _write_kv(4096)),
)
