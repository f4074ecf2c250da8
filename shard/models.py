"""The decoder behind Llama, Mistral, Qwen2 and Qwen3: one model, of which a config switches parts on and off.

Inference only, on tokens in flat layout (`AttentionBatch`). Parameters are plain tensors, allocated empty;
`checkpoint_tensors` gives them under the names of the checkpoint, as views to fill.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

import kernels
from kernels import AttentionBatch
from shard.model_config import ModelConfig
from shard.rope import rotary_tables

KVCache = tuple[Tensor, Tensor]
"""K and V of one layer, each `[num_blocks, block_size, num_kv_heads, head_dim]`."""


class Projection:
    """Linear projections of one input, stacked so that one matmul computes them all."""

    def __init__(
        self, in_features: int, sizes: dict[str, int], bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`sizes`: output features by the projections' checkpoint names, in stacking order."""
        self.sizes = sizes
        out_features = sum(sizes.values())
        self.weight = torch.empty(out_features, in_features, dtype=dtype, device=device)
        self.bias = torch.empty(out_features, dtype=dtype, device=device) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """`[num_tokens, in_features]` to `[num_tokens, out_features]`."""
        return F.linear(x, self.weight, self.bias)

    def checkpoint_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for parameter, stacked in (("weight", self.weight), ("bias", self.bias)):
            if stacked is not None:
                for name, part in zip(
                    self.sizes, stacked.split_with_sizes(list(self.sizes.values())), strict=True
                ):
                    yield f"{name}.{parameter}", part


class DecoderLayer:
    """Attention and a gated MLP, each on a normalised copy of the hidden state and added back to it."""

    def __init__(
        self, config: ModelConfig, sliding_window: int | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.head_dim = config.head_dim
        self.eps = config.rms_norm_eps
        self.sliding_window = sliding_window
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads

        hidden, inner = config.hidden_size, config.intermediate_size
        query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        qkv = {"self_attn.q_proj": query_size, "self_attn.k_proj": kv_size, "self_attn.v_proj": kv_size}
        gate_up = {"mlp.gate_proj": inner, "mlp.up_proj": inner}
        self.qkv = Projection(hidden, qkv, config.qkv_bias, dtype, device)
        self.output = Projection(query_size, {"self_attn.o_proj": hidden}, config.output_bias, dtype, device)
        self.gate_up = Projection(hidden, gate_up, config.mlp_bias, dtype, device)
        self.down = Projection(inner, {"mlp.down_proj": hidden}, config.mlp_bias, dtype, device)

        self.attention_norm = torch.empty(hidden, dtype=dtype, device=device)
        self.mlp_norm = torch.empty(hidden, dtype=dtype, device=device)
        self.query_norm = self.key_norm = None
        if config.qk_norm:
            self.query_norm = torch.empty(config.head_dim, dtype=dtype, device=device)
            self.key_norm = torch.empty(config.head_dim, dtype=dtype, device=device)

    def forward(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, batch: AttentionBatch, kv_cache: KVCache
    ) -> Tensor:
        """`[num_tokens, hidden_size]` to the same; `cos`, `sin`: `[num_tokens, head_dim / 2]`, same dtype."""
        attended = self._attention(
            kernels.rms_norm(hidden, self.attention_norm, self.eps), cos, sin, batch, kv_cache
        )
        hidden = hidden + attended
        gate_up = self.gate_up.forward(kernels.rms_norm(hidden, self.mlp_norm, self.eps))
        return hidden + self.down.forward(kernels.silu_and_mul(gate_up))

    def _attention(
        self, x: Tensor, cos: Tensor, sin: Tensor, batch: AttentionBatch, kv_cache: KVCache
    ) -> Tensor:
        qkv = self.qkv.forward(x).view(len(x), -1, self.head_dim)
        query, key, value = qkv.split_with_sizes(
            [self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1
        )
        if self.query_norm is not None and self.key_norm is not None:
            query = kernels.rms_norm(query, self.query_norm, self.eps)
            key = kernels.rms_norm(key, self.key_norm, self.eps)
        query, key = kernels.rotary_embedding(query, key, cos, sin)

        # Before attention, so that sequences of one step can share blocks that the step itself fills.
        kernels.write_kv(key, value, *kv_cache, batch.slot_mapping)
        attended = kernels.paged_attention(query, *kv_cache, batch, self.head_dim**-0.5, self.sliding_window)
        return self.output.forward(attended.flatten(1))

    def checkpoint_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for projection in (self.qkv, self.output, self.gate_up, self.down):
            yield from projection.checkpoint_tensors()
        yield "input_layernorm.weight", self.attention_norm
        yield "post_attention_layernorm.weight", self.mlp_norm
        if self.query_norm is not None and self.key_norm is not None:
            yield "self_attn.q_norm.weight", self.query_norm
            yield "self_attn.k_norm.weight", self.key_norm


class DecoderModel:
    """Token ids to hidden states to logits."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device, max_model_len: int
    ) -> None:
        """Allocates parameters without values. Positions must stay under `max_model_len`, in tokens."""
        self.config = config
        self.embedding = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.layers = [DecoderLayer(config, window, dtype, device) for window in config.sliding_windows]
        self.norm = torch.empty(config.hidden_size, dtype=dtype, device=device)
        self.head = self.embedding if config.tie_word_embeddings else torch.empty_like(self.embedding)
        self.cos, self.sin = rotary_tables(config, max_model_len, device)

    def forward(self, token_ids: Tensor, batch: AttentionBatch, kv_caches: list[KVCache]) -> Tensor:
        """Runs one step: writes every token's K and V into `kv_caches`, one per layer, and attends to them.

        `token_ids`: `[num_tokens]` int64 in the layout of `batch`. Returns `[num_tokens, hidden_size]`, after
        the last norm.
        """
        hidden = F.embedding(token_ids, self.embedding)
        cos = self.cos[batch.positions].to(hidden.dtype)
        sin = self.sin[batch.positions].to(hidden.dtype)
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            hidden = layer.forward(hidden, cos, sin, batch, kv_cache)
        return kernels.rms_norm(hidden, self.norm, self.config.rms_norm_eps)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Rows of `forward`'s result, `[num_rows, hidden_size]`, to float32 `[num_rows, vocab_size]`."""
        return F.linear(hidden, self.head).float()

    def checkpoint_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter under its checkpoint name, as a view whose shape is the checkpoint tensor's."""
        yield "model.embed_tokens.weight", self.embedding
        for index, layer in enumerate(self.layers):
            for name, tensor in layer.checkpoint_tensors():
                yield f"model.layers.{index}.{name}", tensor
        yield "model.norm.weight", self.norm
        if not self.config.tie_word_embeddings:
            yield "lm_head.weight", self.head
