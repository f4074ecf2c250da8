"""What `load_model_config` reads, and what it refuses and how it says so."""

import json
from pathlib import Path
from typing import Any

import pytest

from shard.model_config import ModelConfig, ModelError, load_model_config
from tests.oracle import SIZES, tiny_model

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def load(folder: Path, family: str = "Llama", **fields: Any) -> ModelConfig:
    config = {"architectures": [f"{family}ForCausalLM"], **SIZES, **fields}
    (folder / "config.json").write_text(json.dumps(config))
    return load_model_config(folder)


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_reads_what_transformers_writes(family: str, tmp_path: Path) -> None:
    tiny_model(tmp_path, family)
    config = load_model_config(tmp_path)
    assert config.architecture == f"{family}ForCausalLM"
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (256, 64, 96)
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (3, 4, 2)
    assert config.head_dim == (128 if family == "Qwen3" else 16)
    assert config.qk_norm == (family == "Qwen3")
    assert config.qkv_bias == (family == "Qwen2")
    assert not config.output_bias
    assert config.sliding_windows == (4096 if family == "Mistral" else None,) * 3
    assert (config.eos_token_ids, config.dtype) == ((2,), "float32")


def test_fields_left_out_take_the_defaults_of_transformers(tmp_path: Path) -> None:
    needed = {name: SIZES[name] for name in SIZES if name not in ("num_key_value_heads", "eos_token_id")}
    del needed["max_position_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **needed}))
    config = load_model_config(tmp_path)
    assert (config.num_kv_heads, config.max_position_embeddings, config.rms_norm_eps) == (4, 2048, 1e-6)
    assert (config.rope.rope_type, config.rope.theta) == ("default", 10_000)
    assert (config.eos_token_ids, config.dtype) == ((), "float32")


@pytest.mark.parametrize(
    ("family", "fields", "windows"),
    [
        ("Mistral", {"sliding_window": 7}, (7, 7, 7)),
        ("Mistral", {"sliding_window": None}, (None, None, None)),
        ("Qwen2", {"sliding_window": 7, "max_window_layers": 1}, (None, None, None)),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}, (None, 7, 7)),
        (
            "Qwen3",
            {
                "use_sliding_window": True,
                "sliding_window": 7,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (7, None, 7),
        ),
        ("Llama", {"sliding_window": 7}, (None, None, None)),
    ],
)
def test_sliding_window_of_each_layer(
    family: str, fields: dict[str, Any], windows: tuple[int | None, ...], tmp_path: Path
) -> None:
    assert load(tmp_path, family, **fields).sliding_windows == windows


def test_generation_config_names_the_end_tokens(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 9, 5]}))
    assert load(tmp_path).eos_token_ids == (5, 9)
    (tmp_path / "generation_config.json").write_text("{}")
    assert load(tmp_path).eos_token_ids == (2,)


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_dtype_under_its_old_and_new_name(name: str, tmp_path: Path) -> None:
    assert load(tmp_path, **{name: "bfloat16"}).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            r"architectures is \['GPT2LMHeadModel'\]; supported: LlamaFor",
        ),
        ({"architectures": None}, r"architectures is missing; supported: .*Qwen3ForCausalLM"),
        ({"architectures": [["x"]]}, "supported: LlamaForCausalLM"),
        (
            {"quantization_config": {"quant_method": "awq"}},
            "quantization_config is .*awq.* aren't supported yet",
        ),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported: 'silu'"),
        ({"hidden_size": None}, "hidden_size is missing; it must be an integer from 1"),
        ({"hidden_size": "64"}, "hidden_size is '64'; it must be an integer"),
        ({"vocab_size": 256.0}, "vocab_size is 256.0; it must be an integer"),
        ({"vocab_size": True}, "vocab_size is True; it must be an integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; it must be an integer from 1 to 10000"),
        ({"intermediate_size": -1}, "intermediate_size is -1"),
        ({"max_position_embeddings": 10**400}, "max_position_embeddings is 1000.*; it must be"),
        (
            {"num_key_value_heads": 3},
            "num_key_value_heads is 3; it must divide num_attention_heads, which is 4",
        ),
        ({"num_key_value_heads": 8}, "num_key_value_heads is 8; it must be an integer from 1 to 4"),
        (
            {"num_attention_heads": 6, "num_key_value_heads": 2},
            "head_dim is missing; hidden_size 64 isn't a mult",
        ),
        ({"head_dim": 15}, "head_dim is 15; rotary embedding needs an even head size"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan; it must be a number from 0 to 1"),
        ({"rms_norm_eps": True}, "rms_norm_eps is True; it must be a number"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'; it must be true or false"),
        ({"dtype": "float8_e4m3fn"}, "dtype is 'float8_e4m3fn'; supported: float32, bfloat16, float16"),
        ({"eos_token_id": 256}, "eos_token_id is 256; it must be token ids under vocab_size, which is 256"),
        ({"eos_token_id": [2, "x"]}, r"eos_token_id is \[2, 'x'\]"),
        ({"layer_types": ["full_attention"]}, "layer_types is .*one entry for each of 3 layers"),
        (
            {"layer_types": ["sliding_attention"] * 2 + [[]]},
            "supported entries: full_attention, sliding_attention",
        ),
        ({"rope_scaling": [1]}, r"rope_scaling is \[1\]; it must be a JSON object"),
        (
            {"rope_scaling": {"type": "longrope", "factor": 2}},
            r"rope_scaling.rope_type is 'longrope'; supported: default, linear, dynamic, yarn, llama3",
        ),
        ({"rope_scaling": {"rope_type": []}}, r"rope_scaling.rope_type is \[\]; supported"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters.factor is missing; .* from 1 to"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 0.5}}, "rope_parameters.factor is 0.5"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
            "one set of parameters for all layers",
        ),
        (
            {"rope_parameters": {**LLAMA3, "high_freq_factor": 1}},
            "high_freq_factor is 1; it must be over low",
        ),
        ({"rope_theta": "1e4"}, "rope_theta is '1e4'; it must be a number"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; supported: 1"),
    ],
)
def test_refuses_with_the_file_the_field_and_what_is_supported(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message) as refusal:
        load(tmp_path, **fields)
    assert str(refusal.value).startswith(f"{tmp_path / 'config.json'}: ")


def test_refuses_layers_that_transformers_would_not_mix(tmp_path: Path) -> None:
    types = ["sliding_attention", "full_attention", "full_attention"]
    with pytest.raises(ModelError, match="MistralForCausalLM supports only one kind of attention"):
        load(tmp_path, "Mistral", layer_types=types, sliding_window=7)


def test_refuses_sliding_layers_without_a_window(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="sliding layers need use_sliding_window"):
        load(tmp_path, "Qwen2", layer_types=["sliding_attention"] * 3)


def test_refuses_a_bad_generation_config_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": -1}))
    with pytest.raises(ModelError, match=r"generation_config\.json: eos_token_id is -1"):
        load(tmp_path)


@pytest.mark.parametrize("text", [b"{", b"\xff\xfe", b'{"a": ' + b"[" * 200_000])
def test_refuses_broken_json(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(ModelError, match=r"config\.json: not valid JSON"):
        load_model_config(tmp_path)


def test_refuses_json_that_is_no_object(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match=r"config\.json: holds list; it must be a JSON object"):
        load_model_config(tmp_path)


def test_refuses_a_missing_folder_and_a_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="absent: no such folder"):
        load_model_config(tmp_path / "absent")
    with pytest.raises(ModelError, match=r"config\.json: no such file"):
        load_model_config(tmp_path)
