"""Rotary position embedding: frequencies under each kind of context scaling, and the tables made of them.

Formulas follow `transformers` (`modeling_rope_utils`), which the checkpoints were made for.
"""

import math

import torch
from torch import Tensor

from shard.model_config import ModelConfig, RopeConfig


def max_context_len(config: ModelConfig) -> int:
    """The longest context, in tokens, that the model supports under its scaling.

    As in vLLM: `linear` and `dynamic` stretch `max_position_embeddings` by their factor; `yarn` stretches
    `original_max_position_embeddings` (by default `max_position_embeddings`), because its checkpoints come
    with `max_position_embeddings` both stretched and not; `llama3` and `default` state the final length.
    """
    rope = config.rope
    if rope.rope_type in ("linear", "dynamic", "yarn"):
        return int(rope.original_max_position * rope.factor)
    return config.max_position_embeddings


def rotary_tables(config: ModelConfig, max_model_len: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines for positions under `max_model_len`: two float32 `[max_model_len, head_dim / 2]`.

    Computed on the CPU whatever the device, so that ranks agree to the bit.
    """
    frequencies, attention_factor = inverse_frequencies(config, max_model_len)
    angles = torch.outer(torch.arange(max_model_len, dtype=torch.float32), frequencies)
    return (angles.cos() * attention_factor).to(device), (angles.sin() * attention_factor).to(device)


def inverse_frequencies(config: ModelConfig, max_model_len: int) -> tuple[Tensor, float]:
    """Radians per position, float32 `[head_dim / 2]`, and the factor on cosines and sines.

    `dynamic` is fixed at the scale of a sequence of `max_model_len` tokens: a scale that followed each
    sequence's length would make its cached K wrong as it grows.
    """
    rope, dim = config.rope, config.head_dim
    match rope.rope_type:
        case "linear":
            return _unscaled(rope.theta, dim) / rope.factor, 1.0
        case "dynamic":
            stretch = max(max_model_len / rope.original_max_position, 1.0)
            theta = rope.theta * (rope.factor * stretch - (rope.factor - 1)) ** (dim / (dim - 2))
            return _unscaled(theta, dim), 1.0
        case "yarn":
            return _yarn(rope, dim), _yarn_attention_factor(rope)
        case "llama3":
            return _llama3(rope, dim), 1.0
    return _unscaled(rope.theta, dim), 1.0


def _unscaled(theta: float, dim: int) -> Tensor:
    """RoFormer (arXiv 2104.09864), section 3.2.2."""
    return 1.0 / _wavelengths(theta, dim)


def _wavelengths(theta: float, dim: int) -> Tensor:
    """In positions per radian."""
    return torch.pow(theta, torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def _yarn(rope: RopeConfig, dim: int) -> Tensor:
    """YaRN (arXiv 2309.00071), section 3.2: keep fast dimensions, interpolate slow ones, blend between."""

    def dimension_turning(rotations: float) -> float:
        """Which dimension turns `rotations` times over the original context."""
        positions_per_radian = rope.original_max_position / (rotations * 2 * math.pi)
        return dim * math.log(positions_per_radian) / (2 * math.log(rope.theta))

    low, high = dimension_turning(rope.beta_fast), dimension_turning(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    slow = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    unscaled = _unscaled(rope.theta, dim)
    return unscaled / rope.factor * slow + unscaled * (1 - slow)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    """YaRN section 3.4, with DeepSeek's two-sided variant where both `mscale` fields are set."""
    if rope.attention_factor is not None:
        return rope.attention_factor

    def magnitude(mscale: float) -> float:
        return 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return magnitude(1.0)


def _llama3(rope: RopeConfig, dim: int) -> Tensor:
    """Llama 3.1: keep what turns often over the original context, slow what turns rarely, blend between."""
    unscaled = _unscaled(rope.theta, dim)
    turns = rope.original_max_position * unscaled / (2 * math.pi)
    keep = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return (1 - keep) * unscaled / rope.factor + keep * unscaled
