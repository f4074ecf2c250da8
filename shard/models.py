"""The decoder behind Llama, Mistral, Mixtral and Qwen: one model with parts that a config switches on.

Inference only, on tokens in flat layout (`AttentionBatch`).
"""

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

import kernels
from kernels import AttentionBatch, KVCache
from shard.layers import DecoderLayer, Placement, whole
from shard.model_config import ModelConfig
from shard.parallel import WHOLE, Partition, RankGroup
from shard.rope import rotary_tables


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
            DecoderLayer(config, partition, index, dtype, device) for index in range(config.num_layers)
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
            inner_sizes=frozenset(size for layer in self.layers for size in layer.inner_sizes),
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

        Of several ranks, only 0 gets them; the others get as many zeros, which take no memory.
        """
        logits = self._head.forward(kernels.rms_norm(hidden, self.norm, self.config.rms_norm_eps))
        if self._ranks is None:
            return logits
        # The last ranks have fewer.
        largest = -(-self.config.vocab_size // self._ranks.world_size)
        parts = self._ranks.gather(F.pad(logits, (0, largest - logits.shape[1])))
        if parts is None:
            return logits.new_zeros(1, 1).expand(len(logits), self.config.vocab_size)
        return torch.cat(parts, dim=1)[:, : self.config.vocab_size]

    def placements(self) -> Iterator[Placement]:
        """What is to be filled, and with what."""
        vocabulary = (self._vocabulary.start, 0)
        yield Placement("model.embed_tokens.weight", self.embedding, vocabulary)
        for index, layer in enumerate(self.layers):
            yield from layer.placements(f"model.layers.{index}.")
        yield whole("model.norm.weight", self.norm)
        if not self.config.tie_word_embeddings and isinstance(self.head, Tensor):
            yield Placement("lm_head.weight", self.head, vocabulary)
