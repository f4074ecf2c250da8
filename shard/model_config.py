"""What a model is: `config.json` of a Hugging Face folder, checked and reduced to what the shard uses."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_SIZE = 2**31 - 1
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")
DTYPES = ("float32", "bfloat16", "float16")


class ModelError(ValueError):
    """A model folder can't be served; the message names the file, the field or tensor, and the limit."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding; what each field means is in `shard.rope`, which computes with them."""

    rope_type: str
    theta: float
    original_max_position: int
    """Tokens of context before scaling (`yarn`, `llama3`); elsewhere `max_position_embeddings`."""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None


@dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of experts in some layers; `kernels.experts` says how it is computed."""

    num_experts: int
    num_per_token: int
    size: int
    """Inner features of one expert."""
    normalise: bool
    shared_size: int
    """Inner features of the MLP beside the experts, which counts by a gate of its own; 0: none."""
    layers: tuple[bool, ...]
    """Per layer, whether it has experts; else it has a plain MLP."""


@dataclass(frozen=True)
class ModelConfig:
    """A decoder of one of the supported families. Sizes count elements, lengths count tokens."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Inner features of a plain MLP."""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    """Whether the projection out of attention has a bias."""
    mlp_bias: bool
    qk_norm: bool
    """Whether queries and keys are normalised per head, before the rotary embedding."""
    sliding_windows: tuple[int | None, ...]
    """Per layer: how many tokens a token sees, itself included; `None` is all of them."""
    rope: RopeConfig
    experts: ExpertsConfig | None
    eos_token_ids: tuple[int, ...]
    dtype: str
    """What the checkpoint says it is stored in: one of `DTYPES`."""


# What `transformers` takes where a config.json leaves a field out.
_COMMON_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
_QWEN_DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_QWEN_EXPERT_DEFAULTS: dict[str, Any] = {
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": False,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"max_position_embeddings": 2048},
    "MistralForCausalLM": {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    "MixtralForCausalLM": {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5,
    },
    "Qwen2ForCausalLM": _QWEN_DEFAULTS,
    "Qwen2MoeForCausalLM": _QWEN_DEFAULTS
    | _QWEN_EXPERT_DEFAULTS
    | {
        "num_key_value_heads": 16,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "qkv_bias": True,
    },
    "Qwen3ForCausalLM": _QWEN_DEFAULTS | {"head_dim": 128},
    "Qwen3MoeForCausalLM": _QWEN_DEFAULTS
    | _QWEN_EXPERT_DEFAULTS
    | {
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
}
_WITH_QUERY_AND_KEY_NORMS = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
_WITH_ATTENTION_BIAS = ("LlamaForCausalLM", *_WITH_QUERY_AND_KEY_NORMS)


class _Fields:
    """The fields of one JSON object, read with checks; `null` counts as absent."""

    def __init__(self, source: Path, values: dict[str, Any], prefix: str = "") -> None:
        self.source = source
        self.values = values
        self.prefix = prefix

    def error(self, field: str, supported: str) -> ModelError:
        value = self.values.get(field)
        said = "is missing" if value is None else f"is {value!r:.200}"
        return ModelError(f"{self.source}: {self.prefix}{field} {said}; {supported}")

    def given(self, field: str) -> bool:
        return self.values.get(field) is not None

    def integer(self, field: str, low: int = 1, high: int = MAX_SIZE) -> int:
        value = self.values.get(field)
        if type(value) is not int or not low <= value <= high:
            raise self.error(field, f"it must be an integer from {low} to {high}")
        return value

    def number(self, field: str, low: float, high: float = 1e9, default: float | None = None) -> float:
        value = self.values[field] if self.given(field) else default
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise self.error(field, f"it must be a number from {low:g} to {high:g}")
        return float(value)

    def boolean(self, field: str) -> bool:
        value = self.values.get(field)
        if type(value) is not bool:
            raise self.error(field, "it must be true or false")
        return value


def load_model_config(path: Path) -> ModelConfig:
    """Reads `config.json` and, if there is one, `generation_config.json` of the model folder `path`.

    End-of-sequence ids come from `generation_config.json` where it has them, as in `transformers`.
    Raises `ModelError` for anything missing, malformed or unsupported.
    """
    if not path.is_dir():
        raise ModelError(f"{path}: no such folder; give the folder that holds config.json and *.safetensors")
    source = path / "config.json"
    raw = _read_object(source)
    architecture = _architecture(source, raw)
    fields = _Fields(source, _COMMON_DEFAULTS | _DEFAULTS[architecture] | raw)

    if fields.given("quantization_config"):
        raise fields.error("quantization_config", "quantised checkpoints aren't supported yet")
    if fields.values["hidden_act"] != "silu":
        raise fields.error("hidden_act", "supported: 'silu'")

    hidden_size = fields.integer("hidden_size", high=2**20)
    num_heads = fields.integer("num_attention_heads", high=2**16)
    num_kv_heads = _kv_heads(fields, num_heads)
    head_dim = _head_dim(fields, hidden_size, num_heads)
    num_layers = fields.integer("num_hidden_layers", high=10_000)
    vocab_size = fields.integer("vocab_size", high=2**26)
    max_position = fields.integer("max_position_embeddings")
    # Only these families have the fields; a stray one elsewhere means nothing to `transformers` either.
    attention_bias = architecture in _WITH_ATTENTION_BIAS and fields.boolean("attention_bias")
    qwen2_bias = architecture == "Qwen2ForCausalLM" or (
        architecture == "Qwen2MoeForCausalLM" and fields.boolean("qkv_bias")
    )

    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size", high=2**24),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_position,
        rms_norm_eps=fields.number("rms_norm_eps", 0, 1),
        tie_word_embeddings=fields.boolean("tie_word_embeddings"),
        qkv_bias=attention_bias or qwen2_bias,
        output_bias=attention_bias,
        mlp_bias=architecture == "LlamaForCausalLM" and fields.boolean("mlp_bias"),
        qk_norm=architecture in _WITH_QUERY_AND_KEY_NORMS,
        sliding_windows=_sliding_windows(fields, architecture, num_layers),
        rope=_rope(fields, max_position, head_dim),
        experts=_experts(fields, architecture, num_layers),
        eos_token_ids=_eos_token_ids(fields, path / "generation_config.json", vocab_size),
        dtype=_dtype(fields),
    )


def _read_object(source: Path) -> dict[str, Any]:
    try:
        value = json.loads(source.read_bytes())
    except FileNotFoundError:
        raise ModelError(f"{source}: no such file; a model folder needs one") from None
    except OSError as error:
        raise ModelError(f"{source}: can't be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{source}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{source}: holds {type(value).__name__}; it must be a JSON object")
    return value


def _architecture(source: Path, raw: dict[str, Any]) -> str:
    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if not isinstance(name, str) or name not in _DEFAULTS:
        raise _Fields(source, raw).error("architectures", f"supported: {', '.join(_DEFAULTS)}")
    return name


def _kv_heads(fields: _Fields, num_heads: int) -> int:
    if not fields.given("num_key_value_heads"):
        return num_heads
    num_kv_heads = fields.integer("num_key_value_heads", high=num_heads)
    if num_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", f"it must divide num_attention_heads, which is {num_heads}")
    return num_kv_heads


def _head_dim(fields: _Fields, hidden_size: int, num_heads: int) -> int:
    if fields.given("head_dim"):
        head_dim = fields.integer("head_dim", high=4096)
    elif hidden_size % num_heads:
        raise fields.error("head_dim", f"hidden_size {hidden_size} isn't a multiple of {num_heads} heads")
    else:
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        raise fields.error("head_dim", f"rotary embedding needs an even head size, not {head_dim}")
    return head_dim


def _sliding_windows(fields: _Fields, architecture: str, num_layers: int) -> tuple[int | None, ...]:
    qwen = architecture.startswith("Qwen")
    window: int | None = None
    mistral = architecture in ("MistralForCausalLM", "MixtralForCausalLM")
    if mistral or (qwen and fields.boolean("use_sliding_window")):
        window = fields.integer("sliding_window") if fields.given("sliding_window") else None
    first = fields.integer("max_window_layers", low=0) if qwen else 0
    windows = tuple(window if layer >= first else None for layer in range(num_layers))

    if not fields.given("layer_types"):
        return windows
    types = fields.values["layer_types"]
    if not isinstance(types, list) or len(types) != num_layers:
        raise fields.error("layer_types", f"it must be a list with one entry for each of {num_layers} layers")
    kinds = {"full_attention": None, "sliding_attention": window}
    if not all(isinstance(kind, str) and kind in kinds for kind in types):
        raise fields.error("layer_types", f"supported entries: {', '.join(kinds)}")
    listed = tuple(kinds[kind] for kind in types)
    if qwen:
        if window is None and "sliding_attention" in types:
            raise fields.error("layer_types", "sliding layers need use_sliding_window and sliding_window")
        return listed
    # `transformers` ignores the list in these families, so there is no telling which of the two was meant.
    if listed != windows:
        raise fields.error("layer_types", f"{architecture} supports only one kind of attention in all layers")
    return windows


def _experts(fields: _Fields, architecture: str, num_layers: int) -> ExpertsConfig | None:
    if architecture == "MixtralForCausalLM":
        return _mixture(fields, "num_local_experts", "intermediate_size", True, (True,) * num_layers)
    if architecture not in ("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"):
        return None
    step, plain = fields.integer("decoder_sparse_step"), fields.values["mlp_only_layers"]
    if not isinstance(plain, list) or not all(type(layer) is int for layer in plain):
        raise fields.error("mlp_only_layers", "it must be a list of layers' numbers")
    layers = tuple(layer not in plain and (layer + 1) % step == 0 for layer in range(num_layers))
    # As `transformers` 5 writes it for Qwen3, and as everybody else does.
    name = "num_local_experts" if fields.given("num_local_experts") else "num_experts"
    return _mixture(
        fields,
        name,
        "moe_intermediate_size",
        fields.boolean("norm_topk_prob"),
        layers,
        fields.integer("shared_expert_intermediate_size", high=2**24)
        if architecture == "Qwen2MoeForCausalLM"
        else 0,
    )


def _mixture(
    fields: _Fields, count: str, size: str, normalise: bool, layers: tuple[bool, ...], shared_size: int = 0
) -> ExpertsConfig | None:
    num_experts = fields.integer(count, high=2**16)
    num_per_token = fields.integer("num_experts_per_tok", high=num_experts)
    inner = fields.integer(size, high=2**24)
    if not any(layers):
        return None
    return ExpertsConfig(num_experts, num_per_token, inner, normalise, shared_size, layers)


def _rope(fields: _Fields, max_position: int, head_dim: int) -> RopeConfig:
    """Reads `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (transformers 4)."""
    name = "rope_scaling" if fields.given("rope_scaling") else "rope_parameters"
    raw = fields.values.get(name) or {}
    if not isinstance(raw, dict):
        raise fields.error(name, "it must be a JSON object or null")
    rope = _Fields(fields.source, dict(raw), f"{name}.")
    if any(isinstance(value, dict) for value in raw.values()):
        raise fields.error(name, "one set of parameters for all layers is supported")
    for key in ("rope_theta", "partial_rotary_factor"):
        if not rope.given(key):
            rope.values[key] = fields.values.get(key)
    if not rope.given("rope_type"):
        rope.values["rope_type"] = raw.get("type", "default")
    rope_type = rope.values["rope_type"]
    if rope_type not in ROPE_TYPES:
        raise rope.error("rope_type", f"supported: {', '.join(ROPE_TYPES)}")
    if rope.number("partial_rotary_factor", 0, default=1.0) != 1:
        raise rope.error("partial_rotary_factor", "supported: 1")

    theta = rope.number("rope_theta", 1.0, default=10_000.0)
    if rope_type == "default":
        return RopeConfig(rope_type, theta, max_position)
    factor = rope.number("factor", 1, 1e6)
    if rope_type == "linear":
        return RopeConfig(rope_type, theta, max_position, factor)
    if rope_type == "dynamic":
        if head_dim == 2:
            raise rope.error("rope_type", "the dynamic type needs a head size over 2")
        return RopeConfig(rope_type, theta, max_position, factor)

    original = "original_max_position_embeddings"
    if fields.given(original):  # the top level wins in `transformers`
        original_max_position = fields.integer(original)
    else:
        original_max_position = rope.integer(original) if rope.given(original) else max_position
    if rope_type == "llama3":
        low = rope.number("low_freq_factor", 1e-6)
        high = rope.number("high_freq_factor", 1e-6)
        if high <= low:
            raise rope.error("high_freq_factor", f"it must be over low_freq_factor, which is {low:g}")
        return RopeConfig(
            rope_type, theta, original_max_position, factor, low_freq_factor=low, high_freq_factor=high
        )
    return _yarn(rope, theta, original_max_position, factor)


def _yarn(rope: _Fields, theta: float, original_max_position: int, factor: float) -> RopeConfig:
    if theta <= 1:
        raise rope.error("rope_theta", "the yarn type needs a number over 1")

    def optional(field: str) -> float | None:
        return rope.number(field, 1e-6) if rope.given(field) else None

    return RopeConfig(
        "yarn",
        theta,
        original_max_position,
        factor,
        beta_fast=rope.number("beta_fast", 1e-6, default=32.0),
        beta_slow=rope.number("beta_slow", 1e-6, default=1.0),
        truncate=rope.boolean("truncate") if rope.given("truncate") else True,
        attention_factor=optional("attention_factor"),
        mscale=optional("mscale"),
        mscale_all_dim=optional("mscale_all_dim"),
    )


def _eos_token_ids(fields: _Fields, generation_config: Path, vocab_size: int) -> tuple[int, ...]:
    if generation_config.exists():
        generation = _Fields(generation_config, _read_object(generation_config))
        if generation.given("eos_token_id"):
            fields = generation
    value = fields.values.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int and 0 <= token < vocab_size for token in ids):
        raise fields.error("eos_token_id", f"it must be token ids under vocab_size, which is {vocab_size}")
    return tuple(dict.fromkeys(ids))


def _dtype(fields: _Fields) -> str:
    name = "dtype" if fields.given("dtype") else "torch_dtype"
    value = fields.values[name] if fields.given(name) else "float32"
    if value not in DTYPES:
        raise fields.error(name, f"supported: {', '.join(DTYPES)}")
    return str(value)
