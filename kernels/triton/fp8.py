"""FP8 E4M3 (arXiv 2209.05433, section 3) to and from wider floats, also on GPUs without such instructions."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: N803

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.tuning import has_native_fp8

NOT_FP8: Final = 0
NATIVE: Final = 1
BITS: Final = 2


def readable(cache: Tensor) -> tuple[Tensor, int]:
    """The cache as a kernel is to read it, and how `widen` converts what it loads."""
    if cache.dtype != torch.float8_e4m3fn:
        return cache, NOT_FP8
    return (cache, NATIVE) if has_native_fp8() else (cache.view(torch.uint8), BITS)


@triton.jit
def widen(x, DTYPE: tl.constexpr, FP8: tl.constexpr):
    """Loaded numbers as `DTYPE`, which holds every E4M3 number exactly. `FP8` is one of the modes above."""
    if FP8 == 2:
        # The bits of an E4M3 number are those of a float16 2**8 times smaller, subnormals included.
        magnitude = (x & 0x7F).to(tl.uint16)
        bits = (magnitude << 7) | ((x & 0x80).to(tl.uint16) << 8)
        wide = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        x = tl.where(magnitude == 0x7F, float("nan"), wide)
    return x.to(DTYPE)


@triton.jit
def narrow(x):
    """float32 to the bits of E4M3, uint8: to nearest, ties to even, saturating; NaN stays NaN."""
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    # Compared as bits, so that no maximum or minimum has to know what to do with NaN.
    magnitude = bits & 0x7FFFFFFF
    is_nan = magnitude > 0x7F800000
    magnitude = tl.where(magnitude > 0x43E00000, 0x43E00000, magnitude).to(tl.uint32)  # 448

    # 20 mantissa bits go; 120 is the difference of the exponents' biases.
    rounded = magnitude + 0x7FFFF + ((magnitude >> 20) & 1)
    normal = (rounded >> 20) - (120 << 3)
    # Under 2**-6 the last place is 2**-9, as in float32 from 2**14 on: the sum's bits count such places.
    counted = magnitude.to(tl.float32, bitcast=True) + 16384.0
    subnormal = counted.to(tl.uint32, bitcast=True) - 0x46800000
    narrowed = tl.where(magnitude < 0x3C800000, subnormal, normal)
    return (sign | tl.where(is_nan, 0x7F, narrowed)).to(tl.uint8)
