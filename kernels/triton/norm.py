"""RMSNorm, alone and with the residual addition before it."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: N803

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_SIZE: Final = 65536
# Rows shorter than this share a program, as those of a norm over each head do.
_ELEMENTS = 1024


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `kernels.reference.rms_norm`. `x` may be strided; the result is contiguous.

    Raises `ValueError` for rows of more than 65536 elements.
    """
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, x, weight, output, eps, add=False)
    return output


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `kernels.reference.add_rms_norm`: the sum is written in the place of `residual`, in one launch."""
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    summed = residual if _row_strides(residual) is not None else residual.contiguous()
    _launch(x, summed, weight, output, eps, add=True)
    return output, summed


def _launch(x: Tensor, residual: Tensor, weight: Tensor, output: Tensor, eps: float, add: bool) -> None:
    size = x.shape[-1]
    if size > MAX_SIZE:
        raise ValueError(f"rows of {size} elements: at most {MAX_SIZE} are supported")
    if not x.numel():
        return
    strides = _row_strides(x)
    if strides is None:
        x = x.contiguous()
        strides = (size * x.shape[-2] if x.ndim > 1 else size, size)
    residual_strides = _row_strides(residual) if add else (0, 0)
    assert residual_strides is not None  # noqa: S101
    num_rows = x.numel() // size
    block = triton.next_power_of_2(size)
    rows = max(1, _ELEMENTS // block)
    _rms_norm[(triton.cdiv(num_rows, rows),)](
        x,
        residual,
        weight,
        output,
        *strides,
        *residual_strides,
        x.shape[-2] if x.ndim > 1 else 1,
        num_rows,
        size,
        eps,
        ROWS=rows,
        BLOCK=block,
        ADD=add,
        num_warps=min(16, max(4, block // 512)),
        enable_fp_fusion=True,
    )


def _row_strides(x: Tensor) -> tuple[int, int] | None:
    """Strides between rows: of all dimensions but the last two as one, and of the last but one.

    None if `x` isn't laid out so.
    """
    if x.stride(-1) != 1:
        return None
    if x.ndim == 1:
        return 0, 0
    for dim in range(x.ndim - 3):
        if x.stride(dim) != x.stride(dim + 1) * x.shape[dim + 1]:
            return None
    return (x.stride(-3) if x.ndim > 2 else 0), x.stride(-2)


@triton.jit(do_not_specialize=["num_inner", "num_rows"])
def _rms_norm(
    x,
    residual,
    weight,
    output,
    outer_stride,
    inner_stride,
    residual_outer_stride,
    residual_inner_stride,
    num_inner,
    num_rows,
    size,
    eps,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
):
    """One program per `ROWS` rows; row `r` is inner row `r % num_inner` of outer row `r // num_inner`."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    mask = (rows < num_rows) & (columns < size)
    outer = rows // num_inner
    inner = rows % num_inner
    read = tl.load(x + outer * outer_stride + inner * inner_stride + columns, mask=mask, other=0.0)
    wide = read.to(tl.float32)
    if ADD:
        where = residual + outer * residual_outer_stride + inner * residual_inner_stride + columns
        summed = (wide + tl.load(where, mask=mask, other=0.0).to(tl.float32)).to(read.dtype)
        tl.store(where, summed, mask=mask)
        # Rounded first, so that the norm of the sum is the norm of what the next layer reads.
        wide = summed.to(tl.float32)
    mean = tl.sum(wide * wide, axis=1, keep_dims=True) / size
    # Rounded before the weight, as in the reference.
    normalised = (wide * tl.rsqrt(mean + eps)).to(read.dtype).to(tl.float32)
    scale = tl.load(weight + columns, mask=columns < size, other=0.0).to(tl.float32)
    tl.store(output + rows * size + columns, normalised * scale, mask=mask)
