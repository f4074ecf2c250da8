"""The gate of the MLP."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: N803

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """See `kernels.reference.silu_and_mul`; rounds once, at the end. Rows may be strided."""
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    if gate_up.stride(1) != 1:
        gate_up = gate_up.contiguous()
    output = gate_up.new_empty(num_tokens, size)
    if output.numel():
        block = min(_BLOCK, triton.next_power_of_2(size))
        grid = (num_tokens, triton.cdiv(size, block))
        _silu_and_mul[grid](gate_up, output, gate_up.stride(0), size, BLOCK=block, enable_fp_fusion=True)
    return output


@triton.jit
def _silu_and_mul(gate_up, output, row_stride, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    gate = tl.load(gate_up + row * row_stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * row_stride + size + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(output + row * size + columns, gate * tl.sigmoid(gate) * up, mask=mask)
