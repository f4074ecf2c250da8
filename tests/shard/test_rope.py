"""Rotary tables against those of `transformers`."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from shard.model_config import load_model_config
from shard.rope import max_context_len, rotary_tables
from tests.oracle import SIZES

MAX_MODEL_LEN = 300
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

# Under `max_position_embeddings` 128; without `rope_type` in transformers-4 form the key is `type`.
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0},
    "yarn-original": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "yarn-betas": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 8, "beta_slow": 0.5},
    "yarn-slow": {"rope_type": "yarn", "factor": 4.0, "beta_slow": 0.001},
    "yarn-attention-factor": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.7},
    "yarn-mscales": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn-one-mscale": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7},
    "yarn-untruncated": {"rope_type": "yarn", "factor": 4.0, "truncate": False},
    "yarn-nulls": {"rope_type": "yarn", "factor": 4.0, "beta_fast": None, "attention_factor": None},
    "llama3": {"rope_type": "llama3", **LLAMA3, "original_max_position_embeddings": 64},
    "llama3-defaults": {"rope_type": "llama3", **LLAMA3},
}


def write_config(folder: Path, fields: dict[str, Any]) -> None:
    config = {"architectures": ["LlamaForCausalLM"], **SIZES, **fields}
    (folder / "config.json").write_text(json.dumps(config))


def transformers_4_form(scaling: dict[str, Any]) -> dict[str, Any]:
    return {"rope_theta": 5000.0, "rope_scaling": scaling}


def transformers_4_form_with_type(scaling: dict[str, Any]) -> dict[str, Any]:
    renamed = {"type" if key == "rope_type" else key: value for key, value in scaling.items()}
    return {"rope_theta": 5000.0, "rope_scaling": renamed}


def transformers_5_form(scaling: dict[str, Any]) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 5000.0, **scaling}}


@pytest.mark.parametrize("form", [transformers_4_form, transformers_4_form_with_type, transformers_5_form])
@pytest.mark.parametrize("name", SCALINGS)
def test_tables_are_those_of_transformers(name: str, form: Any, tmp_path: Path) -> None:
    write_config(tmp_path, form(dict(SCALINGS[name])))
    cos, sin = rotary_tables(load_model_config(tmp_path), MAX_MODEL_LEN, torch.device("cpu"))

    theirs = LlamaRotaryEmbedding(LlamaConfig.from_pretrained(tmp_path))
    their_cos, their_sin = theirs(torch.zeros(1), torch.arange(MAX_MODEL_LEN).unsqueeze(0))

    assert cos.dtype == sin.dtype == torch.float32
    # At position 300, rounding a frequency of 1 to float32 moves the angle by up to 2e-5.
    for ours, expected in ((cos, their_cos), (sin, their_sin)):
        torch.testing.assert_close(torch.cat((ours, ours), dim=-1), expected[0], atol=5e-5, rtol=0)


def test_original_length_at_the_top_level_wins(tmp_path: Path) -> None:
    scaling = transformers_4_form(dict(SCALINGS["yarn"]))
    write_config(tmp_path, {**scaling, "original_max_position_embeddings": 16})
    cos, _ = rotary_tables(load_model_config(tmp_path), MAX_MODEL_LEN, torch.device("cpu"))

    theirs = LlamaRotaryEmbedding(LlamaConfig.from_pretrained(tmp_path))
    expected, _ = theirs(torch.zeros(1), torch.arange(MAX_MODEL_LEN).unsqueeze(0))
    torch.testing.assert_close(cos, expected[0, :, : cos.shape[1]], atol=5e-5, rtol=0)


def test_dynamic_scale_is_that_of_the_served_length_not_of_the_position(tmp_path: Path) -> None:
    write_config(tmp_path, transformers_5_form(SCALINGS["dynamic"]))
    config = load_model_config(tmp_path)
    unscaled, within, beyond = (
        rotary_tables(config, length, torch.device("cpu"))[0][:20] for length in (20, 128, 256)
    )
    assert unscaled.equal(within)
    assert not torch.allclose(within, beyond, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "longest"),
    [
        ("default", 128),
        ("linear", 512),
        ("dynamic", 512),
        ("yarn", 512),
        ("yarn-original", 128),
        ("llama3", 128),
    ],
)
def test_longest_context_under_each_scaling(name: str, longest: int, tmp_path: Path) -> None:
    write_config(tmp_path, transformers_5_form(SCALINGS[name]))
    assert max_context_len(load_model_config(tmp_path)) == longest
