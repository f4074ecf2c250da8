"""Reads a model's safetensors files, memory-mapped and tensor by tensor, into a `DecoderModel`."""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kernels import BlockQuantised
from shard.model_config import ModelConfig, ModelError
from shard.models import DecoderModel
from shard.parallel import WHOLE, Partition
from shard.rope import max_context_len

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
FLOAT_DTYPES = ("F32", "BF16", "F16")
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
SAMPLE_BYTES = 4096


class _Entry(NamedTuple):
    """One tensor as the header of its file describes it; `begin` and `end` are byte offsets in the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def load_model(
    path: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    progress: Callable[[int, int], None] | None = None,
    blocks: Mapping[str, BlockQuantised] = MappingProxyType({}),
    partition: Partition = WHOLE,
) -> DecoderModel:
    """Builds the part of the model and fills it from the folder `path`, converting to `dtype`.

    All headers are checked against `config` before any memory is taken; then peak memory is the model and
    one tensor. Weights that `blocks` stand in for (see `DecoderModel.take_blocks`) aren't read. `progress`
    gets (bytes done, bytes in all) of what is read, after each tensor.
    Raises `ModelError` for a folder that doesn't hold exactly this model, or for a `max_model_len` (tokens)
    over what the model supports.
    """
    longest = max_context_len(config)
    if not 1 <= max_model_len <= longest:
        raise ModelError(
            f"{path}: max_model_len is {max_model_len}; the model supports 1 to {longest} tokens"
        )
    shapes = DecoderModel(config, dtype, torch.device("meta"), max_model_len=1)
    expected = {placement.name: placement.tensor for placement in shapes.placements()}
    entries = _checked(path, expected, _entries(path))

    model = DecoderModel(config, dtype, device, max_model_len, partition)
    model.take_blocks(blocks)
    placements = [*model.placements()]
    total = sum(placement.tensor.nbytes for placement in placements)
    done = 0
    for file in _files(entries[placement.name] for placement in placements):
        try:
            with safe_open(file, framework="pt") as tensors:
                for placement in placements:
                    if entries[placement.name].file == file:
                        placement.tensor.copy_(tensors.get_slice(placement.name)[placement.part])
                        done += placement.tensor.nbytes
                        if progress is not None:
                            progress(done, total)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file}: can't be read: {error}") from error
    return model


def model_revision(path: Path) -> str:
    """A fingerprint of the model in the folder `path`, in hexadecimal: equal ones serve the same model.

    SHA-256 over `config.json`, `generation_config.json` if there is one, and for each weight file in name
    order its name, its size, its header (which names, types and places all tensors) and the middle
    `SAMPLE_BYTES` of each tensor. A few MB are read of a model of any size: it tells models and fine-tunes
    apart, and isn't a checksum.
    Raises `ModelError` like `load_model`.
    """
    digest = hashlib.sha256()

    def add(part: bytes) -> None:
        digest.update(len(part).to_bytes(8, "little") + part)

    entries = _entries(path)
    for config in (path / "config.json", path / "generation_config.json"):
        add(config.read_bytes() if config.exists() else b"")
    for file in _files(entries.values()):
        add(file.name.encode())
        add(file.stat().st_size.to_bytes(8, "little"))
        add(_read_header(file))
        own = sorted(
            (entry for entry in entries.values() if entry.file == file), key=lambda entry: entry.begin
        )
        with file.open("rb") as data:
            for entry in own:
                data.seek(max(entry.begin, (entry.begin + entry.end - SAMPLE_BYTES) // 2))
                add(data.read(min(SAMPLE_BYTES, entry.end - entry.begin)))
    return digest.hexdigest()


def _files(entries: Iterable[_Entry]) -> list[Path]:
    return sorted({entry.file for entry in entries})


def _entries(path: Path) -> dict[str, _Entry]:
    """Every tensor of the checkpoint in the folder `path`, by name."""
    if (path / SINGLE).exists():
        return _file_entries(path / SINGLE)
    index = path / INDEX
    if not index.exists():
        pickles = sorted(file.name for file in path.glob("*.bin"))
        hint = f"; {pickles[0]} is a pickle, which can run code: convert it to safetensors" if pickles else ""
        raise ModelError(f"{path}: holds neither {SINGLE} nor {INDEX}{hint}")

    weight_map = _weight_map(index)
    entries: dict[str, _Entry] = {}
    for name in sorted(set(weight_map.values())):
        # Symbolic links are fine (Hugging Face's cache is made of them), names that lead elsewhere aren't.
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelError(
                f"{index}: weight_map names {name!r}; it must be a .safetensors file of this folder"
            )
        stored = _file_entries(path / name)
        for tensor in (tensor for tensor, file in weight_map.items() if file == name):
            if tensor not in stored:
                raise ModelError(f"{path / name}: tensor {tensor} is missing, though {INDEX} places it here")
            entries[tensor] = stored[tensor]
    return entries


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
    except OSError as error:
        raise ModelError(f"{index}: can't be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        weight_map = None
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ModelError(f"{index}: must be a JSON object with weight_map, from tensor names to file names")
    return weight_map


def _read_header(file: Path) -> bytes:
    try:
        with file.open("rb") as data:
            length = int.from_bytes(data.read(8), "little")
            header = data.read(min(length, MAX_HEADER_BYTES))
    except FileNotFoundError:
        raise ModelError(f"{file}: no such file") from None
    except OSError as error:
        raise ModelError(f"{file}: can't be read: {error.strerror}") from None
    if len(header) < max(length, 2):
        raise ModelError(f"{file}: not a safetensors file, or cut short inside its header")
    return header


def _file_entries(file: Path) -> dict[str, _Entry]:
    header = _read_header(file)
    start = 8 + len(header)
    try:
        fields: dict[str, Any] = json.loads(header)
        entries = {
            name: _Entry(
                file,
                str(field["dtype"]),
                tuple(map(int, field["shape"])),
                *(start + int(offset) for offset in field["data_offsets"]),
            )
            for name, field in fields.items()
            if name != "__metadata__"
        }
        if any(not start <= entry.begin <= entry.end for entry in entries.values()):
            raise ValueError("offsets run backwards")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ModelError(f"{file}: not a safetensors file: its header is malformed") from None
    size, needed = file.stat().st_size, max((entry.end for entry in entries.values()), default=start)
    if size < needed:
        last = max(entries, key=lambda name: entries[name].end)
        raise ModelError(f"{file}: cut short: it has {size} bytes and needs {needed}, up to tensor {last}")
    return entries


def _checked(path: Path, expected: dict[str, Tensor], entries: dict[str, _Entry]) -> dict[str, _Entry]:
    """The entries of the expected tensors, if none is missing, misshapen or of another kind, or left over."""
    for name, tensor in expected.items():
        if name not in entries:
            raise ModelError(f"{path}: tensor {name} is missing; config.json calls for it")
        entry = entries[name]
        if entry.shape != tuple(tensor.shape):
            raise ModelError(
                f"{entry.file}: tensor {name} has shape {list(entry.shape)}; "
                f"config.json calls for {list(tensor.shape)}"
            )
        if entry.dtype not in FLOAT_DTYPES:
            raise ModelError(
                f"{entry.file}: tensor {name} has dtype {entry.dtype}; supported: {', '.join(FLOAT_DTYPES)}"
            )
    for name in entries.keys() - expected.keys():
        # Old checkpoints store the rotary frequencies, and tied ones, which call for no head, may repeat it.
        if not (name.endswith("rotary_emb.inv_freq") or name == "lm_head.weight"):
            raise ModelError(
                f"{entries[name].file}: tensor {name} is unexpected: config.json has no place for it"
            )
    return {name: entries[name] for name in expected}
