"""A stack of decoder layers as one operation: what goes in, and its composition of the small operations.

Attention and a gated MLP, each on a normalised copy of the hidden state and added back to it. This
composition serves every device; `kernels.cpu` does the same in one call.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kernels.batch import AttentionBatch
from kernels.dispatch import paged_attention, rms_norm, rotary_embedding, silu_and_mul, write_kv

KVCache = tuple[Tensor, Tensor]
"""K and V of one layer, each `[num_blocks, block_size, num_kv_heads, head_dim]`."""


@dataclass(frozen=True)
class DecoderShape:
    """What the layers of a stack have in common. Sizes count elements."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """Parameters of one layer, all of one dtype. Matrices are `[out_features, in_features]`.

    `qkv` stacks the projections to queries, keys and values; `gate_up` the gates over the ups.
    """

    attention_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    sliding_window: int | None


class ComposedDecoder:
    """The layers, one small operation after the other."""

    def __init__(self, shape: DecoderShape, layers: Sequence[LayerWeights]) -> None:
        self._shape = shape
        self._layers = layers

    def forward(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, batch: AttentionBatch, kv_caches: Sequence[KVCache]
    ) -> Tensor:
        """Runs all layers, which write every token's K and V into `kv_caches` and attend to them.

        `hidden`: `[num_tokens, hidden_size]` in the layout of `batch`; consumed. `cos`, `sin`: `[num_tokens,
        head_dim / 2]`, same dtype. Returns `[num_tokens, hidden_size]`, before the last norm.
        """
        eps = self._shape.rms_norm_eps
        for layer, kv_cache in zip(self._layers, kv_caches, strict=True):
            normed = rms_norm(hidden, layer.attention_norm, eps)
            hidden = hidden + self._attention(layer, normed, cos, sin, batch, kv_cache)
            gate_up = F.linear(rms_norm(hidden, layer.mlp_norm, eps), layer.gate_up, layer.gate_up_bias)
            hidden = hidden + F.linear(silu_and_mul(gate_up), layer.down, layer.down_bias)
        return hidden

    def _attention(
        self,
        layer: LayerWeights,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        batch: AttentionBatch,
        kv_cache: KVCache,
    ) -> Tensor:
        shape = self._shape
        qkv = F.linear(x, layer.qkv, layer.qkv_bias).view(len(x), -1, shape.head_dim)
        query, key, value = qkv.split_with_sizes([shape.num_heads, *[shape.num_kv_heads] * 2], dim=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            query = rms_norm(query, layer.query_norm, shape.rms_norm_eps)
            key = rms_norm(key, layer.key_norm, shape.rms_norm_eps)
        query, key = rotary_embedding(query, key, cos, sin)

        # Before attention, so that sequences of one step can share blocks that the step itself fills.
        write_kv(key, value, *kv_cache, batch.slot_mapping)
        scale = shape.head_dim**-0.5
        attended = paged_attention(query, *kv_cache, batch, scale, layer.sliding_window)
        return F.linear(attended.flatten(1), layer.output, layer.output_bias)


class PlainLinear:
    """`x @ weight.T` in float32, with `weight` `[out_features, in_features]`."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    def forward(self, x: Tensor) -> Tensor:
        """`[num_rows, in_features]` of the weight's dtype to `[num_rows, out_features]`."""
        return F.linear(x, self._weight).float()
