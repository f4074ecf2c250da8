"""The operations that callers import: each picks its implementation by the device of its tensors."""

from kernels.reference import (
    copy_blocks,
    paged_attention,
    rms_norm,
    rotary_embedding,
    silu_and_mul,
    write_kv,
)

__all__ = [
    "copy_blocks",
    "paged_attention",
    "rms_norm",
    "rotary_embedding",
    "silu_and_mul",
    "write_kv",
]
