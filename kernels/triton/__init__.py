"""The operations of `kernels.reference` in Triton, for CUDA GPUs; under its interpreter also for the CPU.

Kernels are launched on the current CUDA device and stream: make the tensors' device the current one. None of
them waits for the device but `copy_blocks` towards the host, so all others can be captured in a CUDA graph;
`paged_attention` says how.
"""

from kernels.triton.activation import silu_and_mul
from kernels.triton.attention import paged_attention
from kernels.triton.cache import copy_blocks, write_kv
from kernels.triton.experts import mix_experts
from kernels.triton.norm import add_rms_norm, rms_norm
from kernels.triton.rope import rotary_embedding

__all__ = [
    "add_rms_norm",
    "copy_blocks",
    "mix_experts",
    "paged_attention",
    "rms_norm",
    "rotary_embedding",
    "silu_and_mul",
    "write_kv",
]
