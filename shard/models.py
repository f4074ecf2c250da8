"""The decoder behind Llama, Mistral, Qwen2 and Qwen3: one model, of which a config switches parts on and off.

Inference only, on tokens in flat layout (`AttentionBatch`). Parameters are plain tensors, allocated empty;
`checkpoint_tensors` gives them under the names of the checkpoint, as views to fill.
"""

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

import kernels
from kernels import AttentionBatch, KVCache
from shard.model_config import ModelConfig
from shard.rope import rotary_tables


class Projection:
    """Linear projections of one input, stacked so that one matmul computes them all."""

    def __init__(
        self, in_features: int, sizes: dict[str, int], bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`sizes`: output features by the projections' checkpoint names, in stacking order."""
        self.sizes = sizes
        out_features = sum(sizes.values())
        self.weight: kernels.Matrix = torch.empty(out_features, in_features, dtype=dtype, device=device)
        self.bias = torch.empty(out_features, dtype=dtype, device=device) if bias else None

    def take_blocks(self, prefix: str, matrices: Mapping[str, kernels.BlockQuantised]) -> None:
        """Stacks the blocks of its projections as its weight, where all have them and in one format."""
        parts = [matrices.get(f"{prefix}{name}.weight") for name in self.sizes]
        found = [part for part in parts if part is not None]
        if len(found) == len(parts) and len({part.format for part in found}) == 1:
            stacked = torch.cat([part.blocks for part in found])
            self.weight = kernels.BlockQuantised(found[0].format, stacked)

    def checkpoint_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for parameter, stacked in (("weight", self.weight), ("bias", self.bias)):
            if isinstance(stacked, Tensor):
                for name, part in zip(
                    self.sizes, stacked.split_with_sizes(list(self.sizes.values())), strict=True
                ):
                    yield f"{name}.{parameter}", part


class DecoderLayer:
    """The parameters of one layer; `kernels.decoder` says how they are used."""

    def __init__(
        self, config: ModelConfig, sliding_window: int | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.sliding_window = sliding_window
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

    def weights(self) -> kernels.LayerWeights:
        """The parameters as `kernels` takes them."""
        return kernels.LayerWeights(
            attention_norm=self.attention_norm,
            qkv=self.qkv.weight,
            qkv_bias=self.qkv.bias,
            query_norm=self.query_norm,
            key_norm=self.key_norm,
            output=self.output.weight,
            output_bias=self.output.bias,
            mlp_norm=self.mlp_norm,
            gate_up=self.gate_up.weight,
            gate_up_bias=self.gate_up.bias,
            down=self.down.weight,
            down_bias=self.down.bias,
            sliding_window=self.sliding_window,
        )

    @property
    def projections(self) -> tuple[Projection, ...]:
        """All of them, in the order of computation."""
        return (self.qkv, self.output, self.gate_up, self.down)

    def checkpoint_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for projection in self.projections:
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
        self.head: kernels.Matrix = (
            self.embedding if config.tie_word_embeddings else torch.empty_like(self.embedding)
        )
        self.cos, self.sin = rotary_tables(config, max_model_len, device)

    def take_blocks(self, matrices: Mapping[str, kernels.BlockQuantised]) -> None:
        """Takes quantised matrices, by their checkpoint names, as weights that need not be filled.

        The embedding does, also where its blocks are the head.
        """
        for index, layer in enumerate(self.layers):
            for projection in layer.projections:
                projection.take_blocks(f"model.layers.{index}.", matrices)
        name = "model.embed_tokens.weight" if self.config.tie_word_embeddings else "lm_head.weight"
        self.head = matrices.get(name, self.head)

    def prepare(self) -> "DecoderModel":
        """Hands the filled parameters to `kernels`, in which form they run; from here on they are final.

        Layers are taken one by one, so that repacking holds no second copy of them all.
        """
        config = self.config
        shape = kernels.DecoderShape(
            hidden_size=config.hidden_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            intermediate_size=config.intermediate_size,
            rms_norm_eps=config.rms_norm_eps,
        )
        taken = (self.layers.pop(0).weights() for _ in range(len(self.layers)))
        self._decoder = kernels.prepare_decoder(shape, taken, self.embedding.dtype, self.embedding.device)
        self._head = kernels.prepare_linear(self.head, self.embedding.dtype)
        del self.head
        return self

    def forward(self, token_ids: Tensor, batch: AttentionBatch, kv_caches: list[KVCache]) -> Tensor:
        """Runs one step: writes every token's K and V into `kv_caches`, one per layer, and attends to them.

        `token_ids`: `[num_tokens]` int64 in the layout of `batch`. Returns `[num_tokens, hidden_size]`,
        before the last norm.
        """
        hidden = F.embedding(token_ids, self.embedding)
        cos = self.cos[batch.positions].to(hidden.dtype)
        sin = self.sin[batch.positions].to(hidden.dtype)
        return self._decoder.forward(hidden, cos, sin, batch, kv_caches)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Rows of `forward`'s result, `[num_rows, hidden_size]`, to float32 `[num_rows, vocab_size]`."""
        return self._head.forward(kernels.rms_norm(hidden, self.norm, self.config.rms_norm_eps))

    def checkpoint_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What is to be filled, under its checkpoint name: a view of the checkpoint tensor's shape."""
        yield "model.embed_tokens.weight", self.embedding
        for index, layer in enumerate(self.layers):
            for name, tensor in layer.checkpoint_tensors():
                yield f"model.layers.{index}.{name}", tensor
        yield "model.norm.weight", self.norm
        if not self.config.tie_word_embeddings and isinstance(self.head, Tensor):
            yield "lm_head.weight", self.head
