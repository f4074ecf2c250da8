"""The parameters of a decoder's layers, or of a rank's part of them, and where a checkpoint has them.

Plain tensors, allocated empty; `placements` says which part of which of the checkpoint's tensors each is.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

import kernels
from shard.model_config import ExpertsConfig, ModelConfig
from shard.parallel import Partition


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


def whole(name: str, tensor: Tensor) -> Placement:
    return Placement(name, tensor, (0,) * tensor.dim())


@dataclass(frozen=True)
class ExpertNames:
    """What a checkpoint calls a layer's mixture, and the parts of one expert."""

    block: str
    gate: str
    up: str
    down: str


QWEN_EXPERT_NAMES: Final = ExpertNames("mlp", "gate_proj", "up_proj", "down_proj")
EXPERT_NAMES: Final = {"MixtralForCausalLM": ExpertNames("block_sparse_moe", "w1", "w3", "w2")}


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


class ExpertLayer:
    """The experts of one layer that are this rank's."""

    def __init__(
        self,
        config: ExpertsConfig,
        names: ExpertNames,
        hidden_size: int,
        partition: Partition,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        def empty(*size: int) -> Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        self.size = config.size
        self._config, self._names = config, names
        self._held = partition.share(config.num_experts)
        self._gate = empty(config.num_experts, hidden_size)
        self._gate_up = empty(len(self._held), 2 * config.size, hidden_size)
        self._down = empty(len(self._held), hidden_size, config.size)
        self._shared_gate = empty(1, hidden_size) if config.shared_size else None

    def weights(self) -> kernels.Experts:
        """The parameters as `kernels` takes them."""
        return kernels.Experts(
            gate=self._gate,
            gate_up=self._gate_up,
            down=self._down,
            first=self._held.start,
            num_per_token=self._config.num_per_token,
            normalise=self._config.normalise,
            shared_gate=self._shared_gate,
        )

    def placements(self, prefix: str) -> Iterator[Placement]:
        prefix, size = f"{prefix}{self._names.block}.", self.size
        yield whole(f"{prefix}gate.weight", self._gate)
        if self._shared_gate is not None:
            yield whole(f"{prefix}shared_expert_gate.weight", self._shared_gate)
        for index, gate_up, down in zip(self._held, self._gate_up, self._down, strict=True):
            expert = f"{prefix}experts.{index}."
            yield whole(f"{expert}{self._names.gate}.weight", gate_up[:size])
            yield whole(f"{expert}{self._names.up}.weight", gate_up[size:])
            yield whole(f"{expert}{self._names.down}.weight", down)


class DecoderLayer:
    """The parameters of one layer; `kernels.decoder` says how they are used."""

    def __init__(
        self,
        config: ModelConfig,
        partition: Partition,
        index: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`config` is that of the whole model."""
        self.sliding_window = config.sliding_windows[index]
        hidden = range(config.hidden_size)
        experts = config.experts if config.experts and config.experts.layers[index] else None
        names = EXPERT_NAMES.get(config.architecture, QWEN_EXPERT_NAMES)
        self.experts = ExpertLayer(experts, names, len(hidden), partition, dtype, device) if experts else None
        queries = _features(partition.share(config.num_heads), config.head_dim)
        keys = _features(partition.kv_heads(config.num_kv_heads), config.head_dim)
        qkv = {"self_attn.q_proj": queries, "self_attn.k_proj": keys, "self_attn.v_proj": keys}
        self.qkv = Projection(hidden, qkv, config.qkv_bias, dtype, device)
        # What this and `down` give is summed over the ranks, so one of them adds the bias.
        bias = config.output_bias and not partition.rank
        self.output = Projection(queries, {"self_attn.o_proj": hidden}, bias, dtype, device)
        self.gate_up = self.down = None
        mlp, size = "mlp", config.intermediate_size
        if experts:
            mlp, size = f"{names.block}.shared_expert", experts.shared_size
        if size:
            inner = partition.share(size)
            gate_up = {f"{mlp}.gate_proj": inner, f"{mlp}.up_proj": inner}
            self.gate_up = Projection(hidden, gate_up, config.mlp_bias, dtype, device)
            bias = config.mlp_bias and not partition.rank
            self.down = Projection(inner, {f"{mlp}.down_proj": hidden}, bias, dtype, device)

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
            gate_up=self.gate_up.weight if self.gate_up else None,
            gate_up_bias=self.gate_up.bias if self.gate_up else None,
            down=self.down.weight if self.down else None,
            down_bias=self.down.bias if self.down else None,
            sliding_window=self.sliding_window,
            experts=self.experts.weights() if self.experts else None,
        )

    @property
    def inner_sizes(self) -> set[int]:
        """Of its MLP and its experts, as far as they are here."""
        sizes = {len(self.down.inputs)} if self.down else set()
        return sizes | ({self.experts.size} if self.experts else set())

    @property
    def projections(self) -> tuple[Projection, ...]:
        """All of them, in the order of computation."""
        mlp = (self.gate_up, self.down) if self.gate_up and self.down else ()
        return (self.qkv, self.output, *mlp)

    def placements(self, prefix: str) -> Iterator[Placement]:
        for projection in self.projections:
            yield from projection.placements(prefix)
        if self.experts:
            yield from self.experts.placements(prefix)
        yield whole(f"{prefix}input_layernorm.weight", self.attention_norm)
        yield whole(f"{prefix}post_attention_layernorm.weight", self.mlp_norm)
        if self.query_norm is not None and self.key_norm is not None:
            yield whole(f"{prefix}self_attn.q_norm.weight", self.query_norm)
            yield whole(f"{prefix}self_attn.k_norm.weight", self.key_norm)


def _features(heads: range, head_dim: int) -> range:
    return range(heads.start * head_dim, heads.stop * head_dim)
