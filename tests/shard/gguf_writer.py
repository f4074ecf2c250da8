"""GGUF files made of `transformers` models."""

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import quantize
from torch import Tensor

from tests.oracle import VOCAB_SIZE

PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]


def byte_level_tokens() -> list[str]:
    """256 tokens: three special ones, three words, and bytes as GPT-2 writes them but for the last six."""
    others = [chr(256 + offset) for offset in range(256 - len(PRINTABLE))]
    tokens = ["<|end|>", "<s>", "</s>", "he", "ll", "hell", *map(chr, PRINTABLE), *others]
    return tokens[:VOCAB_SIZE]


def llama_order(weight: Tensor, heads: int) -> Tensor:
    """What llama.cpp's converter does to q and k of Llama: halves of a head become pairs of neighbours."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem, _, kind = name.rpartition(".")
    if stem in whole:
        return f"{whole[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[part]}.{kind}"


def write_gguf(
    path: Path,
    model: Any,
    arch: str,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray[Any, Any]] | None = None,
    leave_out: tuple[str, ...] = (),
) -> Path:
    """Writes a `transformers` model as llama.cpp's converter would.

    `metadata` adds to the usual keys or overrides them ([] leaves one out), `tensors` adds.
    """
    config = model.config
    writer = GGUFWriter(path, arch)
    values: dict[str, Any] = {
        f"{arch}.block_count": config.num_hidden_layers,
        f"{arch}.context_length": config.max_position_embeddings,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_attention_heads,
        f"{arch}.attention.head_count_kv": config.num_key_value_heads,
        f"{arch}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{arch}.rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": byte_level_tokens(),
        "tokenizer.ggml.token_type": [TokenType.CONTROL] * 3 + [TokenType.NORMAL] * (VOCAB_SIZE - 3),
        "tokenizer.ggml.merges": ["h e", "l l", "he ll"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    if getattr(config, "head_dim", None):
        values[f"{arch}.attention.key_length"] = config.head_dim
    for key, value in (values | (metadata or {})).items():
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case list() if value:
                writer.add_array(key, value)
    state = {name: weight.float() for name, weight in model.state_dict().items()}
    if config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    for name, weight in state.items():
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            weight = llama_order(weight, heads)
        if gguf_name(name) in leave_out:
            continue
        stored = kind if weight.dim() > 1 else GGMLQuantizationType.F32
        writer.add_tensor(gguf_name(name), quantize(weight.numpy(), stored), raw_dtype=stored)
    for name, array in (tensors or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
