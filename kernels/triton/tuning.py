"""Tile sizes of the attention kernels: per GPU family from `tuned.json`, elsewhere small enough for any GPU.

Looked up, never measured, while serving: `python -m kernels.triton.tune` measures, and writes the table. An
entry is an estimate until the table's `measured_on` names the GPU that it was measured on.
"""

import json
import re
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import torch

TABLE: Final = Path(__file__).with_name("tuned.json")
Kind = Literal["prefill", "decode"]
KINDS: Final[tuple[Kind, ...]] = ("prefill", "decode")
HEAD_DIMS: Final = (64, 128, 256)
# By compute capability. 8.6 and 8.9 are left out: their shared memory is too small for what suits 8.0.
_FAMILIES: Final = {(8, 0): "sm80", (9, 0): "sm90"}
_FIRST_NATIVE_FP8: Final = (8, 9)


class AttentionConfig(NamedTuple):
    """Tile and launch sizes: `block_m` rows of queries (prefill only), `block_n` positions of K and V."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def attention_config(kind: Kind, head_dim: int, itemsize: int) -> AttentionConfig:
    """For the current GPU. `itemsize`: bytes of a number in the caches."""
    bucket = next(size for size in HEAD_DIMS if head_dim <= size)
    return lookup(current_family(), kind, bucket, itemsize)


@lru_cache(maxsize=256)
def lookup(family: str, kind: Kind, bucket: int, itemsize: int) -> AttentionConfig:
    """The table's entry, or else what any GPU can run. `bucket`: one of `HEAD_DIMS`."""
    entry = read_table()["configs"].get(family, {}).get(kind, {}).get(f"{bucket}/{itemsize}")
    return AttentionConfig(*entry) if entry else safe_config(bucket, itemsize)


def safe_config(bucket: int, itemsize: int) -> AttentionConfig:
    """Fits the 64 KiB of shared memory of compute capability 7.5: a tile each of K, V and queries."""
    wide = bucket * max(itemsize, 2)
    return AttentionConfig(16, 16 if wide > 512 else 32, 4, 1)


def read_table() -> dict[str, Any]:
    """`measured_on` and `configs`, as `tuned.json` holds them."""
    table: dict[str, Any] = json.loads(TABLE.read_text())
    return table


def write_table(table: dict[str, Any], path: Path = TABLE) -> None:
    """Replaces `tuned.json`, an entry a line."""
    text = json.dumps(table, indent=2)
    # json would give each number of an entry a line of its own.
    text = re.sub(r"\[[^\[\]]*\]", lambda numbers: " ".join(numbers[0].split()), text)
    path.write_text(text.replace("[ ", "[").replace(" ]", "]") + "\n")


@lru_cache(maxsize=1)
def current_capability() -> tuple[int, int]:
    """Of the current GPU; (0, 0) without one, and on GPUs that aren't NVIDIA's."""
    if not torch.cuda.is_available() or torch.version.cuda is None:
        return 0, 0
    return torch.cuda.get_device_capability()


def current_family() -> str:
    """The table's name for the current GPU, or "other"."""
    return _FAMILIES.get(current_capability(), "other")


def has_native_fp8() -> bool:
    """Whether the current GPU converts E4M3 by instruction, as Triton has it."""
    return current_capability() >= _FIRST_NATIVE_FP8
