"""The decoder behind Llama, Mistral, Qwen2 and Qwen3: one model, of which a config switches parts on and off.

Inference only, on tokens in flat layout (`AttentionBatch`). Parameters are plain tensors, allocated empty: of
a rank's part of the model. `placements` says which part of which of the checkpoint's tensors each of them is.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

import kernels
from kernels import AttentionBatch, KVCache
from shard.model_config import ModelConfig
from shard.parallel import WHOLE, Partition, RankGroup
from shard.rope import rotary_tables


@dataclass(frozen=True)
class Placement:
    """A view to fill with as large a part of the checkpoint's tensor `name`, which begins at `start`."""

    name: str
    tensor: Tensor
    start: tuple[int, ...]

    @property
    def part(self) -> tuple[slice, ...]:
        """Of the checkpoint's tensor."""
        sizes = zip(self.start, self.tensor.shape, strict=True)
        return tuple(slice(start, start + size) for start, size in sizes)


def _whole(name: str, tensor: Tensor) -> Placement:
    return Placement(name, tensor, (0,) * tensor.dim())


class Projection:
    """Linear projections of one input, stacked so that one matmul computes them all."""

    def __init__(
        self,
        inputs: range,
        outputs: dict[str, range],
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`inputs`, and `outputs` by the projections' names in stacking order: which features are here."""
        self.inputs, self.outputs = inputs, outputs
        self.sizes = [len(features) for features in outputs.values()]
        self.weight: kernels.Matrix = torch.empty(sum(self.sizes), len(inputs), dtype=dtype, device=device)
        self.bias = torch.empty(sum(self.sizes), dtype=dtype, device=device) if bias else None

    def take_blocks(self, prefix: str, matrices: Mapping[str, kernels.BlockQuantised]) -> None:
        """Stacks the blocks of its projections as its weight, where all have them and in one format."""
        parts = [matrices.get(f"{prefix}{name}.weight") for name in self.outputs]
        found = [part for part in parts if part is not None]
        if len(found) == len(parts) and len({part.format for part in found}) == 1:
            stacked = torch.cat([part.blocks for part in found])
            self.weight = kernels.BlockQuantised(found[0].format, stacked)

    def placements(self, prefix: str) -> Iterator[Placement]:
        for parameter, stacked in (("weight", self.weight), ("bias", self.bias)):
            if not isinstance(stacked, Tensor):
                continue
            parts = stacked.split_with_sizes(self.sizes)
            for (name, features), part in zip(self.outputs.items(), parts, strict=True):
                start = (features.start, self.inputs.start)[: part.dim()]
                yield Placement(f"{prefix}{name}.{parameter}", part, start)


class DecoderLayer:
    """The parameters of one layer; `kernels.decoder` says how they are used."""

    def __init__(
        self,
        config: ModelConfig,
        partition: Partition,
        sliding_window: int | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`config` is that of the whole model."""
        self.sliding_window = sliding_window
        hidden, inner = range(config.hidden_size), partition.share(config.intermediate_size)
        queries = _features(partition.share(config.num_heads), config.head_dim)
        keys = _features(partition.kv_heads(config.num_kv_heads), config.head_dim)
        qkv = {"self_attn.q_proj": queries, "self_attn.k_proj": keys, "self_attn.v_proj": keys}
        gate_up = {"mlp.gate_proj": inner, "mlp.up_proj": inner}
        self.qkv = Projection(hidden, qkv, config.qkv_bias, dtype, device)
        self.gate_up = Projection(hidden, gate_up, config.mlp_bias, dtype, device)
        # What these give is summed over the ranks, so one of them adds the bias.
        biases = config.output_bias and not partition.rank, config.mlp_bias and not partition.rank
        self.output = Projection(queries, {"self_attn.o_proj": hidden}, biases[0], dtype, device)
        self.down = Projection(inner, {"mlp.down_proj": hidden}, biases[1], dtype, device)

        self.attention_norm = torch.empty(len(hidden), dtype=dtype, device=device)
        self.mlp_norm = torch.empty(len(hidden), dtype=dtype, device=device)
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

    def placements(self, prefix: str) -> Iterator[Placement]:
        for projection in self.projections:
            yield from projection.placements(prefix)
        yield _whole(f"{prefix}input_layernorm.weight", self.attention_norm)
        yield _whole(f"{prefix}post_attention_layernorm.weight", self.mlp_norm)
        if self.query_norm is not None and self.key_norm is not None:
            yield _whole(f"{prefix}self_attn.q_norm.weight", self.query_norm)
            yield _whole(f"{prefix}self_attn.k_norm.weight", self.key_norm)


def _features(heads: range, head_dim: int) -> range:
    return range(heads.start * head_dim, heads.stop * head_dim)


class DecoderModel:
    """Token ids to hidden states to logits, or a rank's part of that.

    Attributes:
        config: The sizes of this rank's part.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int,
        partition: Partition = WHOLE,
    ) -> None:
        """Allocates parameters without values. Positions must stay under `max_model_len`, in tokens.

        Raises `ModelError` if `config` can't be divided so.
        """
        self.config = partition.of(config)
        self._vocabulary = partition.vocabulary(config.vocab_size)
        self._ranks: RankGroup | None = None
        self.embedding = torch.empty(len(self._vocabulary), config.hidden_size, dtype=dtype, device=device)
        self.layers = [
            DecoderLayer(config, partition, window, dtype, device) for window in config.sliding_windows
        ]
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

    def prepare(self, ranks: RankGroup | None = None) -> "DecoderModel":
        """Hands the filled parameters to `kernels`, in which form they run; from here on they are final.

        Layers are taken one by one, so that repacking holds no second copy of them all. `ranks`, if there are
        several, must have joined before the first step.
        """
        self._ranks = ranks
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
        self._decoder = kernels.prepare_decoder(
            shape, taken, self.embedding.dtype, self.embedding.device, ranks
        )
        self._head = kernels.prepare_linear(self.head, self.embedding.dtype)
        del self.head
        return self

    def forward(self, token_ids: Tensor, batch: AttentionBatch, kv_caches: list[KVCache]) -> Tensor:
        """Runs one step: writes every token's K and V into `kv_caches`, one per layer, and attends to them.

        `token_ids`: `[num_tokens]` int64 in the layout of `batch`. Returns `[num_tokens, hidden_size]`,
        before the last norm.
        """
        hidden = self._embed(token_ids)
        cos = self.cos[batch.positions].to(hidden.dtype)
        sin = self.sin[batch.positions].to(hidden.dtype)
        return self._decoder.forward(hidden, cos, sin, batch, kv_caches)

    def _embed(self, token_ids: Tensor) -> Tensor:
        if self._ranks is None:
            return F.embedding(token_ids, self.embedding)
        rows = token_ids - self._vocabulary.start
        elsewhere = (rows < 0) | (rows >= len(self._vocabulary))
        hidden = F.embedding(rows.masked_fill(elsewhere, 0), self.embedding)
        hidden.masked_fill_(elsewhere.unsqueeze(-1), 0)
        self._ranks.all_reduce(hidden)
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Rows of `forward`'s result, `[num_rows, hidden_size]`, to float32 `[num_rows, vocab_size]`.

        Of several ranks, only 0 gets them all; the others get their own part, for which nobody has a use.
        """
        logits = self._head.forward(kernels.rms_norm(hidden, self.norm, self.config.rms_norm_eps))
        if self._ranks is None:
            return logits
        # The last ranks have fewer.
        largest = -(-self.config.vocab_size // self._ranks.world_size)
        parts = self._ranks.gather(F.pad(logits, (0, largest - logits.shape[1])))
        return torch.cat(parts, dim=1)[:, : self.config.vocab_size] if parts else logits

    def placements(self) -> Iterator[Placement]:
        """What is to be filled, and with what."""
        vocabulary = (self._vocabulary.start, 0)
        yield Placement("model.embed_tokens.weight", self.embedding, vocabulary)
        for index, layer in enumerate(self.layers):
            yield from layer.placements(f"model.layers.{index}.")
        yield _whole("model.norm.weight", self.norm)
        if not self.config.tie_word_embeddings and isinstance(self.head, Tensor):
            yield Placement("lm_head.weight", self.head, vocabulary)
