"""One function per operation, with one documented signature each; see `kernels.reference`.

Callers import from here only. Where an operation has more than one implementation, the choice by the
tensors' device is made in this file, so nothing outside `kernels` knows which one ran.

No `__version__` here: `transformers` takes a versioned top-level `kernels` for Hugging Face's package.
"""

from kernels.batch import AttentionBatch
from kernels.reference import (
    copy_blocks,
    paged_attention,
    rms_norm,
    rotary_embedding,
    silu_and_mul,
    write_kv,
)

__all__ = [
    "AttentionBatch",
    "copy_blocks",
    "paged_attention",
    "rms_norm",
    "rotary_embedding",
    "silu_and_mul",
    "write_kv",
]
