"""The table of what `benchmarks.kernels` measures: operations of `kernels` on the shapes that steps have.

To add one, write a function from a `Shape` to a `Prepared` and list it in `CASES`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor

import kernels
from kernels import AttentionBatch, DecoderShape, KVCache, LayerWeights, reference
from kernels.decoder import ComposedDecoder, PlainLinear

BLOCK_SIZE: Final = 16
# Of a stack of layers: more than a CPU's caches hold, and little to wait for.
NUM_LAYERS: Final = 10
# What each half of a layer adds to the hidden state, which should stay about 1 in size.
RESIDUAL_SCALE: Final = 0.1

Operation = Callable[..., Any]


@dataclass(frozen=True)
class Shape:
    """Sizes of a model in elements, and where and how large a case is."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
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

    `peer` is plain PyTorch, and `oracle` takes the arguments in float32. `num_bytes` counts each input and
    output once. `written` are the arguments that it writes in place, for operations that return nothing.
    `num_roundings` may add up on the way from an argument to a result.
    """

    ours: Operation
    peer: Operation
    oracle: Operation
    arguments: tuple[Any, ...]
    num_bytes: int
    num_flops: int = 0
    written: tuple[int, ...] = field(default=())
    num_roundings: int = 1


@dataclass(frozen=True)
class Case:
    """A row of the table."""

    name: str
    prepare: Callable[[Shape], Prepared]


def _small(operation: str, *rest: Any, **more: Any) -> Prepared:
    """An operation that `kernels` chooses by device, and `reference` has under the same name."""
    plain = getattr(reference, operation)
    return Prepared(getattr(kernels, operation), plain, plain, *rest, **more)


def _size(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _rms_norm(tokens: int) -> Callable[[Shape], Prepared]:
    def prepare(shape: Shape) -> Prepared:
        x, weight = shape.tensor(tokens, shape.hidden_size), shape.tensor(shape.hidden_size)
        return _small("rms_norm", (x, weight, 1e-5), 2 * _size(x) + _size(weight))

    return prepare


def _silu_and_mul(tokens: int) -> Callable[[Shape], Prepared]:
    def prepare(shape: Shape) -> Prepared:
        gate_up = shape.tensor(tokens, 2 * shape.intermediate_size)
        return _small("silu_and_mul", (gate_up,), _size(gate_up) * 3 // 2)

    return prepare


def _rotary(tokens: int) -> Callable[[Shape], Prepared]:
    def prepare(shape: Shape) -> Prepared:
        query = shape.tensor(tokens, shape.num_heads, shape.head_dim)
        key = shape.tensor(tokens, shape.num_kv_heads, shape.head_dim)
        cos, sin = shape.tensor(tokens, shape.head_dim // 2), shape.tensor(tokens, shape.head_dim // 2)
        return _small("rotary_embedding", (query, key, cos, sin), 2 * _size(query, key) + _size(cos, sin))

    return prepare


def _caches(shape: Shape, num_blocks: int) -> tuple[Tensor, Tensor]:
    size = (num_blocks, BLOCK_SIZE, shape.num_kv_heads, shape.head_dim)
    return shape.tensor(*size), shape.tensor(*size)


def _write_kv(tokens: int) -> Callable[[Shape], Prepared]:
    def prepare(shape: Shape) -> Prepared:
        key, value = (shape.tensor(tokens, shape.num_kv_heads, shape.head_dim) for _ in range(2))
        caches = _caches(shape, 4 * tokens // BLOCK_SIZE + 1)
        slots = torch.randperm(caches[0].shape[0] * BLOCK_SIZE, device=shape.device)[:tokens]
        return _small("write_kv", (key, value, *caches, slots), 2 * _size(key, value), written=(2, 3))

    return prepare


def _copy_blocks(blocks: int) -> Callable[[Shape], Prepared]:
    def prepare(shape: Shape) -> Prepared:
        count = shape.count(blocks)
        layers = [_caches(shape, 4 * count) for _ in range(4)]
        order = torch.randperm(4 * count).tolist()
        moved = 2 * 2 * len(layers) * count * _size(layers[0][0][0])
        arguments = (layers, layers, order[:count], order[count : 2 * count])
        return _small("copy_blocks", arguments, moved, written=(1,))

    return prepare


@dataclass(frozen=True)
class _Sequences:
    """A batch and what its attention must read and compute."""

    batch: AttentionBatch
    num_tokens: int
    num_blocks: int
    num_bytes: int
    """K and V of one layer that are attended to."""
    num_flops: int
    """Of one layer."""

    @classmethod
    def build(cls, shape: Shape, sequences: Sequence[tuple[int, int, int]]) -> "_Sequences":
        """`sequences`: how many of them, with how many tokens to compute, of how many in all."""
        queries: list[int] = []
        lengths: list[int] = []
        for count, query, length in sequences:
            count = shape.count(count) if count > 1 else 1
            query = shape.count(query) if query > 1 else 1
            queries += [query] * count
            lengths += [max(shape.count(length), query)] * count
        blocks = [-(-length // BLOCK_SIZE) for length in lengths]
        order = torch.randperm(sum(blocks)).to(torch.int32)
        tables = torch.zeros(len(blocks), max(blocks), dtype=torch.int32)
        for row, part in enumerate(torch.split(order, blocks)):
            tables[row, : len(part)] = part
        # Token by token: those that it sees, itself included.
        seen = sum(q * length - q * (q - 1) // 2 for q, length in zip(queries, lengths, strict=True))
        return cls(
            AttentionBatch.build(tables.to(shape.device), queries, lengths, BLOCK_SIZE),
            sum(queries),
            sum(blocks),
            sum(lengths) * 2 * shape.num_kv_heads * shape.head_dim * shape.dtype.itemsize,
            4 * seen * shape.num_heads * shape.head_dim,
        )


def _attention(*sequences: tuple[int, int, int]) -> Callable[[Shape], Prepared]:
    """See `_Sequences.build`."""

    def prepare(shape: Shape) -> Prepared:
        of = _Sequences.build(shape, sequences)
        caches = _caches(shape, of.num_blocks)
        query = shape.tensor(of.num_tokens, shape.num_heads, shape.head_dim)
        return _small(
            "paged_attention",
            (query, *caches, of.batch, shape.head_dim**-0.5),
            2 * _size(query) + of.num_bytes,
            of.num_flops,
        )

    return prepare


def _layer(shape: Shape) -> LayerWeights:
    """A random one that keeps values of about 1 at about 1."""
    hidden, attended = shape.hidden_size, shape.num_heads * shape.head_dim
    keys = shape.num_kv_heads * shape.head_dim

    def matrix(size: int, depth: int, scale: float = 1.0) -> Tensor:
        return shape.tensor(size, depth).mul_(scale * depth**-0.5)

    return LayerWeights(
        attention_norm=torch.ones_like(shape.tensor(hidden)),
        qkv=matrix(attended + 2 * keys, hidden),
        qkv_bias=None,
        query_norm=None,
        key_norm=None,
        output=matrix(hidden, attended, RESIDUAL_SCALE),
        output_bias=None,
        mlp_norm=torch.ones_like(shape.tensor(hidden)),
        gate_up=matrix(2 * shape.intermediate_size, hidden),
        gate_up_bias=None,
        down=matrix(hidden, shape.intermediate_size, RESIDUAL_SCALE),
        down_bias=None,
        sliding_window=None,
    )


def _matrices(layer: LayerWeights) -> list[Tensor]:
    return [value for value in vars(layer).values() if isinstance(value, Tensor) and value.dim() == 2]


def _widened(layer: LayerWeights) -> LayerWeights:
    fields = vars(layer).items()
    widened: dict[str, Any] = {name: value.float() for name, value in fields if isinstance(value, Tensor)}
    return replace(layer, **widened)


def _decoder(*sequences: tuple[int, int, int]) -> Callable[[Shape], Prepared]:
    """A stack of layers, as a step runs it; see `_Sequences.build`."""

    def prepare(shape: Shape) -> Prepared:
        of = _Sequences.build(shape, sequences)
        layers = [_layer(shape) for _ in range(NUM_LAYERS)]
        decoder_shape = DecoderShape(
            shape.hidden_size,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            frozenset({shape.intermediate_size}),
            rms_norm_eps=1e-5,
        )
        hidden = shape.tensor(of.num_tokens, shape.hidden_size)
        angles = torch.rand(of.num_tokens, shape.head_dim // 2, device=shape.device)
        arguments = (
            hidden,
            angles.cos().to(shape.dtype),
            angles.sin().to(shape.dtype),
            of.batch,
            [_caches(shape, of.num_blocks) for _ in layers],
        )
        weights = [matrix for layer in layers for matrix in _matrices(layer)]
        return Prepared(
            _keeping(kernels.prepare_decoder(decoder_shape, layers, shape.dtype, shape.device).forward),
            _keeping(ComposedDecoder(decoder_shape, layers).forward),
            _keeping(ComposedDecoder(decoder_shape, [_widened(layer) for layer in layers]).forward),
            arguments,
            _size(*weights) + 2 * _size(hidden) + NUM_LAYERS * of.num_bytes,
            2 * of.num_tokens * sum(weight.numel() for weight in weights) + NUM_LAYERS * of.num_flops,
            num_roundings=2 * NUM_LAYERS,
        )

    return prepare


def _keeping(forward: Operation) -> Operation:
    """`forward` on a copy of the hidden state, which it consumes, and which many calls would let grow."""

    def run(hidden: Tensor, cos: Tensor, sin: Tensor, batch: AttentionBatch, caches: list[KVCache]) -> Any:
        return forward(hidden.clone(), cos, sin, batch, caches)

    return run


def _head(rows: int) -> Callable[[Shape], Prepared]:
    """Logits, which a model computes of each sequence's last token."""

    def prepare(shape: Shape) -> Prepared:
        count = shape.count(rows) if rows > 1 else 1
        x = shape.tensor(count, shape.hidden_size)
        weight = shape.tensor(shape.vocab_size, shape.hidden_size) * shape.hidden_size**-0.5
        return Prepared(
            kernels.prepare_linear(weight, shape.dtype).forward,
            PlainLinear(weight).forward,
            PlainLinear(weight.float()).forward,
            (x,),
            _size(x, weight) + 4 * count * shape.vocab_size,
            2 * count * weight.numel(),
        )

    return prepare


CASES: Final = (
    Case(f"{NUM_LAYERS} layers, 1 decode at 256 tokens", _decoder((1, 1, 256))),
    Case(f"{NUM_LAYERS} layers, 16 decodes at 256 tokens", _decoder((16, 1, 256))),
    Case(f"{NUM_LAYERS} layers, 64 decodes at 256 tokens", _decoder((64, 1, 256))),
    Case(f"{NUM_LAYERS} layers, a prompt of 256 tokens", _decoder((1, 256, 256))),
    Case("logits of 1 token", _head(1)),
    Case("logits of 64 tokens", _head(64)),
    Case("rms_norm, 64 tokens", _rms_norm(64)),
    Case("rms_norm, 256 tokens", _rms_norm(256)),
    Case("rotary_embedding, 64 tokens", _rotary(64)),
    Case("rotary_embedding, 256 tokens", _rotary(256)),
    Case("silu_and_mul, 64 tokens", _silu_and_mul(64)),
    Case("silu_and_mul, 256 tokens", _silu_and_mul(256)),
    Case("write_kv, 64 tokens", _write_kv(64)),
    Case("write_kv, 256 tokens", _write_kv(256)),
    Case("copy_blocks, 64 blocks of 4 layers", _copy_blocks(64)),
    Case("paged_attention, 1 decode at 4,096 tokens", _attention((1, 1, 4096))),
    Case("paged_attention, 64 decodes at 256 tokens", _attention((64, 1, 256))),
    Case("paged_attention, 64 decodes at 1,024 tokens", _attention((64, 1, 1024))),
    Case("paged_attention, 256 of a prompt's 256 tokens", _attention((1, 256, 256))),
    Case("paged_attention, 256 of a prompt's 4,096 tokens", _attention((1, 256, 4096))),
    Case("paged_attention, 32 decodes beside 224 of a prompt", _attention((32, 1, 512), (1, 224, 1024))),
)
# Too large for a CPU, and enough to fill a GPU.
GPU_CASES: Final = (
    Case(f"{NUM_LAYERS} layers, 1 decode at 256 tokens", _decoder((1, 1, 256))),
    Case(f"{NUM_LAYERS} layers, 16 decodes at 256 tokens", _decoder((16, 1, 256))),
    Case(f"{NUM_LAYERS} layers, 64 decodes at 256 tokens", _decoder((64, 1, 256))),
    Case(f"{NUM_LAYERS} layers, a prompt of 256 tokens", _decoder((1, 256, 256))),
    Case("logits of 1 token", _head(1)),
    Case("logits of 64 tokens", _head(64)),
    Case("paged_attention, 256 decodes at 2,048 tokens", _attention((256, 1, 2048))),
    Case("paged_attention, 4,096 of a prompt's 4,096 tokens", _attention((1, 4096, 4096))),
    Case("rms_norm, 4,096 tokens", _rms_norm(4096)),
    Case("rotary_embedding, 4,096 tokens", _rotary(4096)),
    Case("silu_and_mul, 4,096 tokens", _silu_and_mul(4096)),
    Case("write_kv, 4,096 tokens", _write_kv(4096)),
)
