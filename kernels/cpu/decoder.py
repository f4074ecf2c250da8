"""Decoder layers and linear maps on packed weights, run by the compiled library."""

import ctypes
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.batch import AttentionBatch
from kernels.block_quantised import FORMATS, BlockQuantised, Matrix
from kernels.cpu import library
from kernels.decoder import DecoderShape, KVCache, LayerWeights, Ranks
from kernels.experts import Experts

SUFFIXES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
DENSE = -1
# decoder.cpp holds a head's queries and values on its stack.
MAX_HEAD_DIM = 256


def supports(shape: DecoderShape, dtype: torch.dtype) -> bool:
    """Whether the library can run such layers. Weights are packed in pairs along the depth."""
    depths = (shape.hidden_size, shape.head_dim, *shape.inner_sizes)
    return dtype in SUFFIXES and shape.head_dim <= MAX_HEAD_DIM and all(depth % 2 == 0 for depth in depths)


def supports_linear(weight: Matrix, dtype: torch.dtype) -> bool:
    """Whether the library can multiply rows of `dtype` by `weight`."""
    if isinstance(weight, BlockQuantised):
        return dtype == torch.bfloat16
    return dtype in SUFFIXES and weight.shape[1] % 2 == 0


class PackedLinear:
    """`x @ weight.T` in float32, with `weight` `[out_features, in_features]` packed into panels."""

    def __init__(self, native: ctypes.CDLL, weight: Matrix, dtype: torch.dtype) -> None:
        self._size, self._depth = weight.shape
        self._panels, self._format = pack(native, weight)
        self._dtype = dtype
        self._run = _function(native, "linear", dtype)

    def forward(self, x: Tensor) -> Tensor:
        """`[num_rows, in_features]` of the dtype to float32 `[num_rows, out_features]`."""
        x = x.contiguous()
        _check(x.dtype == self._dtype and x.shape[1:] == (self._depth,), "x", x)
        result = torch.empty(len(x), self._size, dtype=torch.float32)
        weight = (self._panels.data_ptr(), self._format, self._depth, self._size)
        self._run(x.data_ptr(), len(x), *weight, result.data_ptr())
        return result


class PackedDecoder:
    """`ComposedDecoder` in one call of the library."""

    def __init__(
        self,
        native: ctypes.CDLL,
        shape: DecoderShape,
        layers: Iterable[LayerWeights],
        ranks: Ranks | None = None,
    ) -> None:
        """Packs layer by layer: an iterator that drops what it yielded keeps one layer in memory twice."""
        self._sums = _Sums(ranks) if ranks else None
        packed = [_packed(native, layer) for layer in layers]
        self._tensors = [tensors for tensors, _ in packed]
        self._layers = (library.Layer * len(packed))(*(layer for _, layer in packed))
        self._dtype = self._tensors[0]["attention_norm"].dtype
        self._run = _function(native, "run_layers", self._dtype)
        self._kv_heads = (shape.num_kv_heads, shape.head_dim)
        self._hidden_size, self._half = shape.hidden_size, shape.head_dim // 2
        self._shape = library.Shape(
            hidden_size=shape.hidden_size,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            eps=shape.rms_norm_eps,
            scale=shape.head_dim**-0.5,
        )
        # Weakly: the caches are their owner's to free.
        self._bound: Callable[[], Tensor | None] = lambda: None

    def forward(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, batch: AttentionBatch, kv_caches: Sequence[KVCache]
    ) -> Tensor:
        """See `ComposedDecoder.forward`. Writes the result over `hidden`."""
        if kv_caches[0][0] is not self._bound():
            self._bind(kv_caches)
        num_tokens = len(batch.slot_mapping)
        _check(
            hidden.dtype == self._dtype and hidden.shape == (num_tokens, self._hidden_size), "hidden", hidden
        )
        for name, table in (("cos", cos), ("sin", sin)):
            _check(table.dtype == self._dtype and table.shape == (num_tokens, self._half), name, table)
        hidden, cos, sin = hidden.contiguous(), cos.contiguous(), sin.contiguous()
        tables = batch.block_tables.contiguous()
        step = library.Step(
            num_seqs=len(batch.query_lens),
            num_tokens=num_tokens,
            block_size=kv_caches[0][0].shape[1],
            table_stride=tables.shape[1],
            slot_mapping=batch.slot_mapping.data_ptr(),
            block_tables=tables.data_ptr(),
            query_start=batch.query_start.data_ptr(),
            seq_lens=batch.seq_lens.data_ptr(),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            adds_to_hidden=True,
        )
        arguments = (ctypes.byref(self._shape), self._layers, len(self._layers), ctypes.byref(step))
        if self._sums:
            self._sums.run(hidden, step, lambda: self._run(*arguments, hidden.data_ptr()))
        else:
            self._run(*arguments, hidden.data_ptr())
        return hidden

    def _bind(self, kv_caches: Sequence[KVCache]) -> None:
        for layer, (key, value) in zip(self._layers, kv_caches, strict=True):
            for name, cache in (("key_cache", key), ("value_cache", value)):
                fits = cache.dtype == self._dtype and cache.shape[2:] == self._kv_heads
                _check(fits and cache.is_contiguous(), name, cache)
                setattr(layer, name, cache.data_ptr())
        self._bound = weakref.ref(kv_caches[0][0])


class _Sums:
    """What the library calls after each half layer: sums the hidden state over the ranks.

    Rank 0 adds its part to the hidden state, the others put theirs in its place, so the sum is the whole.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._hidden = torch.empty(0)
        self._failure: Exception | None = None
        # Kept, as the library has its address.
        self._callback = library.Callback(self._sum)

    def run(self, hidden: Tensor, step: library.Step, layers: Callable[[], None]) -> None:
        """Runs `layers`, which `step` describes; raises what a sum raised, which can't pass the library."""
        self._hidden, self._failure = hidden, None
        step.sum_over_ranks, step.adds_to_hidden = self._callback, self._ranks.rank == 0
        layers()
        if self._failure is not None:
            raise self._failure

    def _sum(self) -> None:
        if self._failure is None:
            try:
                self._ranks.all_reduce(self._hidden)
            except Exception as failure:
                self._failure = failure


def _packed(native: ctypes.CDLL, layer: LayerWeights) -> tuple[dict[str, Tensor], library.Layer]:
    """The layer's tensors, matrices as panels, and the structure of their addresses."""
    tensors: dict[str, Tensor] = {}
    formats: dict[str, int] = {}
    for name, value in vars(layer).items():
        if name in ("qkv", "output", "gate_up", "down") and value is not None:
            tensors[name], formats[f"{name}_format"] = pack(native, value, gated=name == "gate_up")
        elif isinstance(value, Tensor):
            tensors[name] = value.contiguous()
    addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    packed = library.Layer(sliding_window=layer.sliding_window or 0, **formats, **addresses)
    packed.mlp_size = 0 if layer.down is None else layer.down.shape[1]
    if layer.experts:
        packed.experts = ctypes.pointer(_packed_experts(native, layer.experts, tensors))
    return tensors, packed


def _packed_experts(native: ctypes.CDLL, experts: Experts, tensors: dict[str, Tensor]) -> library.Experts:
    """Their structure; what has the addresses in it goes to `tensors`."""
    addresses: dict[str, Any] = {}
    for name in ("gate", "shared_gate"):
        if (weight := getattr(experts, name)) is not None:
            tensors[f"experts.{name}"] = weight.contiguous()
            addresses[name] = tensors[f"experts.{name}"].data_ptr()
    for name in ("gate_up", "down"):
        panels = [pack(native, weight, gated=name == "gate_up")[0] for weight in getattr(experts, name)]
        tensors |= {f"experts.{name}.{index}": each for index, each in enumerate(panels)}
        addresses[name] = (ctypes.c_void_p * len(panels))(*(each.data_ptr() for each in panels))
    return library.Experts(
        num_experts=len(experts.gate),
        first=experts.first,
        num_held=len(experts.down),
        num_per_token=experts.num_per_token,
        expert_size=experts.down.shape[2],
        normalise=experts.normalise,
        **addresses,
    )


def pack(native: ctypes.CDLL, weight: Matrix, gated: bool = False) -> tuple[Tensor, int]:
    """`weight` `[out_features, in_features]` as panels (see weights.h), flat uint8, and their format's code.

    `gated`: the two halves of `weight` are gates and ups, which a panel holds side by side.
    """
    size, depth = weight.shape
    if isinstance(weight, BlockQuantised):
        code, source, element_size = FORMATS[weight.format].code, weight.blocks.contiguous(), 1
    else:
        code, source, element_size = DENSE, weight.contiguous(), weight.element_size()
    packed = torch.empty(
        native.pagoda_packed_bytes(size, depth, gated, code, element_size), dtype=torch.uint8
    )
    addresses = (source.data_ptr(), size, depth, gated)
    if code == DENSE:
        _function(native, "pack", source.dtype)(*addresses, packed.data_ptr())
    else:
        native.pagoda_pack_quantised(*addresses, code, packed.data_ptr())
    return packed, code


def _function(native: ctypes.CDLL, name: str, dtype: torch.dtype) -> "ctypes._NamedFuncPointer":
    return getattr(native, f"pagoda_{name}_{SUFFIXES[dtype]}")  # type: ignore[no-any-return]


def _check(fits: bool, name: str, tensor: Tensor) -> None:
    """The library can't: it gets addresses."""
    if not fits:
        raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}, which doesn't fit these layers")
