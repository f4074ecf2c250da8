"""Llama-shaped models with random weights, made when first asked for and kept in the user's cache."""

import json
import tempfile
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models

from common.paths import cache_root
from shard.model_config import load_model_config
from shard.models import DecoderModel
from shard.weights import INDEX

MAX_MODEL_LEN: Final = 8192
# Those of Llama 3.2 1B and Llama 3.1 8B; `tiny` is for tests.
SHAPES: Final[dict[str, dict[str, Any]]] = {
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "llama-1b": {
        "vocab_size": 128_256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "llama-8b": {
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
}
_COMMON: Final[dict[str, Any]] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "max_position_embeddings": MAX_MODEL_LEN,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_FILE_BYTES: Final = 2 << 30


def random_model(shape: str, dtype: str = "bfloat16") -> Path:
    """The folder of a model of this shape."""
    folder = cache_root() / "benchmarks" / f"{shape}-{dtype}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as made:
            write_model(Path(made) / shape, SHAPES[shape], dtype)
            try:
                (Path(made) / shape).rename(folder)
            except OSError:
                # Another process was faster.
                if not folder.exists():
                    raise
    return folder


def write_model(folder: Path, sizes: dict[str, Any], dtype: str) -> None:
    """Config, tokenizer and weights, in files of about `_FILE_BYTES`."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**_COMMON, **sizes, "torch_dtype": dtype}, indent=1))
    _write_tokenizer(folder, sizes["vocab_size"])
    config = load_model_config(folder)
    kind = getattr(torch, dtype)
    shapes = DecoderModel(config, kind, torch.device("meta"), max_model_len=1).placements()
    # A GPU draws billions of weights in a second.
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)
    weight_map: dict[str, str] = {}
    held: dict[str, torch.Tensor] = {}

    def write() -> None:
        name = f"model-{len(set(weight_map.values())):05}.safetensors"
        save_file(held, folder / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(held, name))
        held.clear()

    for name, tensor in ((placement.name, placement.tensor) for placement in shapes):
        if "norm" in name:
            held[name] = torch.ones(tensor.shape, dtype=kind)
        else:
            drawn = torch.empty(tensor.shape, dtype=kind, device=device)
            held[name] = drawn.normal_(0, 0.02, generator=generator).cpu()
        if sum(one.nbytes for one in held.values()) > _FILE_BYTES:
            write()
    if held:
        write()
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Token 7 is the word `t7`."""
    words = {f"t{index}": index for index in range(vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"eos_token": "t1", "bos_token": "t0"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
