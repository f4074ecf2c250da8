"""Converts a GGUF file, once, into a Hugging Face model folder that `shard.weights` and `transformers` read.

Quantised files become bfloat16, the dtype the model computes in anyway: its 8 significant bits round a weight
by at most 0.2 %, less than the quantisation did except for Q8_0. Unquantised files keep their float dtype.
"""

import fcntl
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from common.disk import shortage
from kernels import FORMATS, BlockQuantised
from shard.gguf_file import GgufFile, GgufTensor
from shard.gguf_tokenizer import ImportedTokenizer, build_tokenizer
from shard.model_config import ModelError, load_model_config

Progress = Callable[[int, int], None]
"""Called with the bytes written, and those to write in all."""

_ARCHITECTURES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
# Changes whenever the folders that are written do, so that older ones aren't taken for current.
_FORMAT = 1
_SAMPLES = 64
_SAMPLE_BYTES = 1 << 16
# GGUF keeps only what came of these, in `rope_freqs.weight`; Llama 3.1 to 3.3 all use this set.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


class _Target(NamedTuple):
    """A tensor to write: its Hugging Face name, its shape, where it comes from."""

    name: str
    shape: tuple[int, ...]
    source: GgufTensor
    head_dim: int | None
    """Of the rows to bring back from llama.cpp's order of rotary pairs; None where rows stay."""


def cached_import(source: Path, cache_root: Path, progress: Progress | None = None) -> Path:
    """The model folder of the GGUF file `source` under `cache_root`: found there, or converted now.

    Files of one name, size and content (64 KiB at each of 64 places, both ends among them) share a folder.
    Raises like `import_gguf`.
    """
    try:
        identity = _identity(source)
        cache_root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(f"{error.filename}: {error.strerror}") from None
    return import_gguf(source, cache_root / f"{source.stem}-{identity}", progress)


def import_gguf(source: Path, destination: Path, progress: Progress | None = None) -> Path:
    """Converts the GGUF file `source` into the folder `destination`, and returns that.

    The folder appears whole or not at all, and one that is there is taken as it is. Another process that
    converts into the same folder is waited for. `progress` is called first with (0, total), but not if the
    folder is there. Peak memory is a few copies of 4 Mi weights, whatever the model's size.

    Raises:
        ModelError: the file isn't a sound GGUF file of a supported kind, or the disk is too small.
    """
    config = destination / "config.json"
    try:
        # Asked twice, so that a finished cache needs no lock and may be read-only.
        if config.is_file():
            return destination
        with _locked(destination):
            if not config.is_file():
                _convert(source, destination, progress or (lambda done, total: None))
    except OSError as error:
        raise ModelError(f"{destination}: can't be written: {error.strerror}") from None
    return destination


def block_matrices(source: Path) -> dict[str, BlockQuantised]:
    """The matrices of a GGUF file that `kernels` can compute with as they are, by their Hugging Face names.

    Their values are those that `import_gguf` writes in bfloat16.
    Raises `ModelError` like `import_gguf`.
    """
    matrices = {}
    with GgufFile(source) as gguf:
        for target in _targets(gguf, _config(gguf)):
            if target.source.kind.name in FORMATS and len(target.shape) == 2:
                blocks = gguf.raw_rows(target.source)
                if target.head_dim is not None:
                    blocks = _unpermuted(blocks, target.head_dim)
                matrices[target.name] = BlockQuantised(target.source.kind.name, blocks)
    return matrices


def _identity(source: Path) -> str:
    size = source.stat().st_size
    digest = hashlib.sha256(f"{_FORMAT} {size}".encode())
    with source.open("rb") as file:
        for sample in range(_SAMPLES):
            file.seek(max(size - _SAMPLE_BYTES, 0) * sample // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]


@contextmanager
def _locked(destination: Path) -> Iterator[None]:
    """Holds a lock on what `destination` will be; the system lets go of it if the process dies."""
    with (destination.parent / f".{destination.name}.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _convert(source: Path, destination: Path, progress: Progress) -> None:
    # The lock is ours, so what is here was left by a crash.
    partial = destination.parent / f".{destination.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    with GgufFile(source) as gguf:
        config = _config(gguf)
        tokenizer = build_tokenizer(gguf.metadata, config["max_position_embeddings"])
        dtype = _dtype(gguf)
        config |= {"dtype": str(dtype).removeprefix("torch."), **_token_ids(tokenizer)}
        targets = _targets(gguf, config)
        total = sum(math.prod(target.shape) * dtype.itemsize for target in targets)
        _check_disk(partial, total)
        try:
            partial.mkdir()
            _write_small_files(partial, config, tokenizer)
            try:
                load_model_config(partial)
            except ModelError as error:
                reason = str(error).removeprefix(f"{partial}/")
                raise ModelError(f"{source}: becomes a model that can't be served: {reason}") from None
            _write_tensors(partial / "model.safetensors", gguf, targets, dtype, progress)
            _sync(partial)
            # What is there has lost its config.json, and is no model.
            shutil.rmtree(destination, ignore_errors=True)
            partial.rename(destination)
            _sync(destination.parent)
        except BaseException as error:
            shutil.rmtree(partial, ignore_errors=True)
            if isinstance(error, OSError):
                # Others may have filled it meanwhile.
                _check_disk(partial, total)
            raise


def _check_disk(folder: Path, tensor_bytes: int) -> None:
    # 64 MiB are ample for the tokenizer and the file system.
    if reason := shortage(folder.parent, "for the converted model", tensor_bytes + (1 << 26)):
        raise ModelError(f"{reason}; XDG_CACHE_HOME names another folder")


def _dtype(gguf: GgufFile) -> torch.dtype:
    """What to write in. Matrices decide: norms are float32 in every file."""
    kinds = {tensor.dtype for tensor in gguf.tensors.values() if len(tensor.shape) > 1}
    if None in kinds:
        return torch.bfloat16
    found = [kind for kind in kinds if kind is not None]
    return found[0] if len(found) == 1 else torch.float32


def _config(gguf: GgufFile) -> dict[str, Any]:
    """config.json without the token ids and the dtype."""
    metadata = gguf.metadata
    key = "general.architecture"
    arch = metadata.text(key)
    if arch not in _ARCHITECTURES:
        raise metadata.error(key, f"supported: {', '.join(_ARCHITECTURES)}")
    if "split.count" in metadata and metadata.integer("split.count", low=0) > 1:
        raise metadata.error("split.count", "merge the parts into one file with llama-gguf-split --merge")
    if f"{arch}.expert_count" in metadata and metadata.integer(f"{arch}.expert_count", low=0):
        raise metadata.error(f"{arch}.expert_count", "mixtures of experts aren't supported")

    hidden_size = metadata.integer(f"{arch}.embedding_length")
    num_heads = metadata.integer(f"{arch}.attention.head_count")
    head_dim = metadata.integer(f"{arch}.attention.key_length", max(hidden_size // num_heads, 1))
    for same in ("attention.value_length", "rope.dimension_count"):
        if metadata.integer(f"{arch}.{same}", head_dim) != head_dim:
            raise metadata.error(f"{arch}.{same}", f"it must be the head size, which is {head_dim}")
    embedding = gguf.tensors.get("token_embd.weight")
    config = {
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": metadata.integer(f"{arch}.feed_forward_length"),
        # Every layer has tensors, so their number bounds what a broken file can ask for.
        "num_hidden_layers": metadata.integer(f"{arch}.block_count", high=len(gguf.tensors)),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.integer(f"{arch}.attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": metadata.integer(f"{arch}.context_length"),
        "rms_norm_eps": _single(metadata.number(f"{arch}.attention.layer_norm_rms_epsilon")),
        "vocab_size": embedding.shape[0] if embedding else len(metadata.texts("tokenizer.ggml.tokens")),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "attention_bias": arch == "llama" and "blk.0.attn_output.bias" in gguf.tensors,
        "rope_parameters": _rope(gguf, arch, head_dim),
    }
    family = _ARCHITECTURES[arch]
    window = f"{arch}.attention.sliding_window"
    if window in metadata and metadata.integer(window, low=0):
        config["sliding_window"] = metadata.integer(window)
        if arch == "llama":
            family = "Mistral"
        else:
            config |= {"use_sliding_window": True, "max_window_layers": 0}
    return {"architectures": [f"{family}ForCausalLM"], "model_type": family.lower(), **config}


def _single(value: float) -> float:
    """The shortest decimal for a number that was stored in float32: 1e-5, not 9.999999747378752e-06."""
    return float(f"{value:.7g}")


def _rope(gguf: GgufFile, arch: str, head_dim: int) -> dict[str, Any]:
    metadata, prefix = gguf.metadata, f"{arch}.rope."
    theta = _single(metadata.number(f"{prefix}freq_base", 10_000.0))
    kind = metadata.text(f"{prefix}scaling.type", "none")
    if f"{prefix}scale_linear" in metadata and metadata.number(f"{prefix}scale_linear") != 1:
        raise metadata.error(f"{prefix}scale_linear", f"supported: {prefix}scaling.type")
    if "rope_freqs.weight" in gguf.tensors:
        if kind != "none":
            raise metadata.error(f"{prefix}scaling.type", "rope_freqs.weight scales as well")
        return _llama3_rope(gguf, theta, head_dim)
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    rope = {
        "rope_type": kind,
        "rope_theta": theta,
        "factor": _single(metadata.number(f"{prefix}scaling.factor")),
    }
    if kind == "linear":
        return rope
    if kind != "yarn":
        raise metadata.error(f"{prefix}scaling.type", "supported: none, linear, yarn")
    for unknown in ("attn_factor", "yarn_ext_factor", "yarn_attn_factor", "yarn_log_multiplier"):
        key = f"{prefix}scaling.{unknown}"
        if key in metadata and metadata.number(key) != 1:
            raise metadata.error(key, "supported: 1")
    for name, yarn in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
        if f"{prefix}scaling.{yarn}" in metadata:
            rope[name] = _single(metadata.number(f"{prefix}scaling.{yarn}"))
    original = f"{prefix}scaling.original_context_length"
    if original in metadata:
        rope["original_max_position_embeddings"] = metadata.integer(original)
    return rope


def _llama3_rope(gguf: GgufFile, theta: float, head_dim: int) -> dict[str, Any]:
    """Llama 3's scaling from the divisors of the frequencies that it came to."""
    tensor = gguf.tensors["rope_freqs.weight"]
    if tensor.shape != (head_dim // 2,):
        raise ModelError(f"{gguf.path}: tensor rope_freqs.weight has shape {list(tensor.shape)}")
    divisors = next(gguf.rows(tensor))[0].double()
    factor = _single(float(divisors.max()))
    if bool((divisors == 1).all()):
        return {"rope_type": "default", "rope_theta": theta}
    frequencies = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    turns = _LLAMA3["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    expected = 1 / ((1 - keep) / factor + keep)
    if not torch.allclose(divisors, expected, rtol=1e-3):
        raise ModelError(
            f"{gguf.path}: tensor rope_freqs.weight isn't the scaling of Llama 3.1 to 3.3 ({_LLAMA3}); "
            "no other is supported"
        )
    return {"rope_type": "llama3", "rope_theta": theta, "factor": factor, **_LLAMA3}


def _token_ids(tokenizer: ImportedTokenizer) -> dict[str, Any]:
    special = tokenizer.special
    end = [*special.end]
    ids = {
        "bos_token_id": special.bos,
        "eos_token_id": end[0] if len(end) == 1 else end or None,
        "pad_token_id": special.padding,
    }
    return {name: token for name, token in ids.items() if token is not None}


def _targets(gguf: GgufFile, config: dict[str, Any]) -> list[_Target]:
    """Every tensor of the model, found in the file with the right shape, and none left over."""
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries = config["num_attention_heads"] * head
    keys = config["num_key_value_heads"] * head
    model_type = config["model_type"]
    # llama.cpp turns pairs of neighbours in files of this architecture, Hugging Face's models the two halves.
    permuted = head if model_type in ("llama", "mistral") else None
    targets: list[_Target] = []

    def add(theirs: str, ours: str, *shape: int, head_dim: int | None = None) -> None:
        tensor = gguf.tensors.get(theirs)
        if tensor is None:
            raise ModelError(f"{gguf.path}: tensor {theirs} is missing")
        if tensor.shape != shape:
            raise ModelError(
                f"{gguf.path}: tensor {theirs} has shape {list(tensor.shape)}; "
                f"the metadata calls for {list(shape)}"
            )
        targets.append(_Target(ours, shape, tensor, head_dim))

    add("token_embd.weight", "model.embed_tokens.weight", config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        theirs, ours = f"blk.{layer}.", f"model.layers.{layer}."
        attention = f"{ours}self_attn."
        add(f"{theirs}attn_norm.weight", f"{ours}input_layernorm.weight", hidden)
        projections = (("q", queries, permuted), ("k", keys, permuted), ("v", keys, None))
        for name, size, head_dim in projections:
            new = f"{attention}{name}_proj"
            add(f"{theirs}attn_{name}.weight", f"{new}.weight", size, hidden, head_dim=head_dim)
            if config["attention_bias"] or model_type == "qwen2":
                add(f"{theirs}attn_{name}.bias", f"{new}.bias", size, head_dim=head_dim)
        if model_type == "qwen3":
            add(f"{theirs}attn_q_norm.weight", f"{attention}q_norm.weight", head)
            add(f"{theirs}attn_k_norm.weight", f"{attention}k_norm.weight", head)
        add(f"{theirs}attn_output.weight", f"{attention}o_proj.weight", hidden, queries)
        if config["attention_bias"]:
            add(f"{theirs}attn_output.bias", f"{attention}o_proj.bias", hidden)
        add(f"{theirs}ffn_norm.weight", f"{ours}post_attention_layernorm.weight", hidden)
        add(f"{theirs}ffn_gate.weight", f"{ours}mlp.gate_proj.weight", inner, hidden)
        add(f"{theirs}ffn_up.weight", f"{ours}mlp.up_proj.weight", inner, hidden)
        add(f"{theirs}ffn_down.weight", f"{ours}mlp.down_proj.weight", hidden, inner)
    add("output_norm.weight", "model.norm.weight", hidden)
    if not config["tie_word_embeddings"]:
        add("output.weight", "lm_head.weight", config["vocab_size"], hidden)

    left_over = gguf.tensors.keys() - {target.source.name for target in targets} - {"rope_freqs.weight"}
    if left_over:
        names = ", ".join(sorted(left_over)[:5])
        raise ModelError(f"{gguf.path}: {model_type} models have no place for the tensors {names}")
    vocab_size, tokens = config["vocab_size"], len(gguf.metadata.texts("tokenizer.ggml.tokens"))
    if tokens > vocab_size:
        raise ModelError(
            f"{gguf.path}: tokenizer.ggml.tokens has {tokens} tokens, and token_embd.weight {vocab_size} rows"
        )
    return targets


def _write_small_files(folder: Path, config: dict[str, Any], tokenizer: ImportedTokenizer) -> None:
    ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    generation = {name: config[name] for name in ids if name in config}
    texts = {
        "config.json": json.dumps(config, indent=2),
        "generation_config.json": json.dumps(generation, indent=2),
        "tokenizer.json": tokenizer.tokenizer.to_str(),
        "tokenizer_config.json": json.dumps(tokenizer.config, indent=2, ensure_ascii=False),
    }
    if tokenizer.chat_template is not None:
        texts["chat_template.jinja"] = tokenizer.chat_template
    for name, text in texts.items():
        with (folder / name).open("w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())


def _write_tensors(
    path: Path, gguf: GgufFile, targets: list[_Target], dtype: torch.dtype, progress: Progress
) -> None:
    """Writes a safetensors file as its format's documentation has it: length, header, data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    total = 0
    for target in targets:
        end = total + math.prod(target.shape) * dtype.itemsize
        header[target.name] = {"dtype": _DTYPES[dtype], "shape": target.shape, "data_offsets": (total, end)}
        total = end
    encoded = json.dumps(header).encode()
    # Data must begin at a multiple of 8 bytes.
    encoded += b" " * (-len(encoded) % 8)
    done = 0
    progress(done, total)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for target in targets:
            for rows in _rows(gguf, target):
                data = rows.to(dtype).contiguous().view(torch.uint8)
                done += file.write(data.numpy().data)
            progress(done, total)
        file.flush()
        os.fsync(file.fileno())


def _rows(gguf: GgufFile, target: _Target) -> Iterator[Tensor]:
    """Some whole rows of the target at a time, in its order."""
    if target.head_dim is None:
        yield from gguf.rows(target.source)
    elif len(target.shape) == 1:
        for row in gguf.rows(target.source):
            yield _unpermuted(row.view(-1, 1), target.head_dim)
    else:
        for rows in gguf.rows(target.source, group=target.head_dim):
            yield _unpermuted(rows, target.head_dim)


def _unpermuted(rows: Tensor, head_dim: int) -> Tensor:
    """Undoes the conversion's `permute`: per head, from pairs of neighbours to halves."""
    return rows.view(-1, head_dim // 2, 2, rows.shape[-1]).transpose(1, 2).reshape(rows.shape)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
