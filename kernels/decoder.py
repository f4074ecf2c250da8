"""A stack of decoder layers as one operation: what goes in, and its composition of the small operations.

Attention and a gated MLP, each on a normalised copy of the hidden state and added back to it. This
composition serves every device; `kernels.cpu` does the same in one call.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kernels.batch import AttentionBatch
from kernels.block_quantised import BlockQuantised, Matrix
from kernels.dispatch import (
    add_rms_norm,
    mix_experts,
    paged_attention,
    rms_norm,
    rotary_embedding,
    route,
    silu_and_mul,
    write_kv,
)
from kernels.experts import Experts


class Ranks(Protocol):
    """All ranks of a tensor-parallel group, each of which has some of the heads and of the inner features."""

    rank: int

    def all_reduce(self, x: Tensor) -> None:
        """Sums `x` over all of them, in place."""


KVCache = tuple[Tensor, Tensor]
"""K and V of one layer, each `[num_blocks, block_size, num_kv_heads, head_dim]`."""


@dataclass(frozen=True)
class DecoderShape:
    """What the layers of a stack have in common. Sizes count elements."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    inner_sizes: frozenset[int]
    """Of all MLPs and experts."""
    rms_norm_eps: float


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """Parameters of one layer, all of one dtype but for quantised matrices.

    `qkv` stacks the projections to queries, keys and values; `gate_up` the gates over the ups. A layer has an
    MLP, or experts, or both.
    """

    attention_norm: Tensor
    qkv: Matrix
    qkv_bias: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Matrix
    output_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Matrix | None
    gate_up_bias: Tensor | None
    down: Matrix | None
    down_bias: Tensor | None
    sliding_window: int | None
    experts: Experts | None = None


class ComposedDecoder:
    """The layers, one small operation after the other."""

    def __init__(
        self, shape: DecoderShape, layers: Sequence[LayerWeights], ranks: Ranks | None = None
    ) -> None:
        """`shape` and `layers` are this rank's, of which biases on the way back to `hidden` count once."""
        self._shape, self._ranks = shape, ranks
        self._layers = [_Layer(layer) for layer in layers]

    def forward(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, batch: AttentionBatch, kv_caches: Sequence[KVCache]
    ) -> Tensor:
        """Runs all layers, which write every token's K and V into `kv_caches` and attend to them.

        `hidden`: `[num_tokens, hidden_size]` in the layout of `batch`; consumed. `cos`, `sin`: `[num_tokens,
        head_dim / 2]`, same dtype. Returns `[num_tokens, hidden_size]`, before the last norm.
        """
        eps = self._shape.rms_norm_eps
        # What the last half layer computed, added to `hidden` with the norm that follows.
        pending: Tensor | None = None
        for layer, kv_cache in zip(self._layers, kv_caches, strict=True):
            parameters = layer.parameters
            if pending is None:
                normed = rms_norm(hidden, parameters.attention_norm, eps)
            else:
                normed, hidden = add_rms_norm(pending, hidden, parameters.attention_norm, eps)
            pending = self._summed(self._attention(layer, normed, cos, sin, batch, kv_cache))
            normed, hidden = add_rms_norm(pending, hidden, parameters.mlp_norm, eps)
            pending = self._summed(layer.mlp(normed))
        return hidden if pending is None else hidden + pending

    def _summed(self, partial: Tensor) -> Tensor:
        if self._ranks is not None:
            self._ranks.all_reduce(partial)
        return partial

    def _attention(
        self, layer: "_Layer", x: Tensor, cos: Tensor, sin: Tensor, batch: AttentionBatch, kv_cache: KVCache
    ) -> Tensor:
        shape, parameters = self._shape, layer.parameters
        qkv = F.linear(x, layer.qkv, parameters.qkv_bias).view(len(x), -1, shape.head_dim)
        query, key, value = qkv.split_with_sizes([shape.num_heads, *[shape.num_kv_heads] * 2], dim=1)
        if parameters.query_norm is not None and parameters.key_norm is not None:
            query = rms_norm(query, parameters.query_norm, shape.rms_norm_eps)
            key = rms_norm(key, parameters.key_norm, shape.rms_norm_eps)
        query, key = rotary_embedding(query, key, cos, sin)

        # Before attention, so that sequences of one step can share blocks that the step itself fills.
        write_kv(key, value, *kv_cache, batch.slot_mapping)
        scale = shape.head_dim**-0.5
        attended = paged_attention(query, *kv_cache, batch, scale, parameters.sliding_window)
        return F.linear(attended.flatten(1), layer.output, parameters.output_bias)


class _Layer:
    """A layer with its matrices dense, for `F.linear`."""

    def __init__(self, parameters: LayerWeights) -> None:
        dtype = parameters.attention_norm.dtype
        self.parameters = parameters
        self.qkv = dense(parameters.qkv, dtype)
        self.output = dense(parameters.output, dtype)
        self._gate_up = None if parameters.gate_up is None else dense(parameters.gate_up, dtype)
        self._down = None if parameters.down is None else dense(parameters.down, dtype)

    def mlp(self, x: Tensor) -> Tensor:
        """What the layer's MLP and its experts make of `[num_tokens, hidden_size]`."""
        parameters, experts, made = self.parameters, self.parameters.experts, None
        if self._gate_up is not None and self._down is not None:
            inner = silu_and_mul(F.linear(x, self._gate_up, parameters.gate_up_bias))
            made = F.linear(inner, self._down, parameters.down_bias)
            if experts and experts.shared_gate is not None:
                made = made * F.linear(x, experts.shared_gate).sigmoid()
        if experts:
            shares, chosen = route(x, experts.gate, experts.num_per_token, experts.normalise)
            mixed = mix_experts(x, shares, chosen, experts.gate_up, experts.down, experts.first)
            made = mixed if made is None else made + mixed
        assert made is not None  # noqa: S101
        return made


def dense(matrix: Matrix, dtype: torch.dtype) -> Tensor:
    """`matrix` as a tensor of `dtype`."""
    return matrix.dense(dtype) if isinstance(matrix, BlockQuantised) else matrix


class PlainLinear:
    """`x @ weight.T` in float32, with `weight` `[out_features, in_features]`."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    def forward(self, x: Tensor) -> Tensor:
        """`[num_rows, in_features]` of the weight's dtype to `[num_rows, out_features]`."""
        return F.linear(x, self._weight).float()
