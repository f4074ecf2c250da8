"""A mixture of experts: each expert's tokens are multiplied together, all experts in one launch."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: N803

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.activation import silu_and_mul

# Rows of one expert in a tile; fewer where most experts get few tokens, as in decode steps.
_FEW_ROWS, _MANY_ROWS = 16, 64
_COLUMNS, _DEPTH = 64, 32


class _Groups(NamedTuple):
    """The (token, place) pairs whose expert is held, in the order of the experts."""

    order: Tensor
    """`[num_pairs]`: pairs by number; those of experts that aren't held come last."""
    starts: Tensor
    """`[num_held + 1]`: where each expert's begin."""
    tiles: Tensor
    """`[num_held + 1]`: which tile is each expert's first."""


def mix_experts(
    x: Tensor, shares: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, first: int
) -> Tensor:
    """See `kernels.reference.mix_experts`; a token's experts are summed in the order of `experts`."""
    num_held, _, size = down.shape
    pairs = experts.numel()
    if not pairs or not num_held:
        return torch.zeros_like(x)
    x, gate_up, down = x.contiguous(), gate_up.contiguous(), down.contiguous()
    rows = _MANY_ROWS if pairs >= _MANY_ROWS * num_held else _FEW_ROWS
    groups = _group(experts, first, num_held, rows)
    # As many tiles as there can be: how many there are is known on the device alone.
    num_tiles = triton.cdiv(pairs, rows) + num_held
    inner = x.new_empty(pairs, 2 * size)
    _multiply(x, gate_up, inner, groups, shares, num_tiles, rows, back=False)
    made = torch.zeros(pairs, x.shape[1], dtype=torch.float32, device=x.device)
    _multiply(silu_and_mul(inner), down, made, groups, shares, num_tiles, rows, back=True)
    return made.view(*experts.shape, -1).sum(1).to(x.dtype)


def _group(experts: Tensor, first: int, num_held: int, rows: int) -> _Groups:
    index = experts.flatten() - first
    index = torch.where((index >= 0) & (index < num_held), index, num_held)
    counts = torch.zeros(num_held + 1, dtype=torch.int64, device=index.device)
    counts.scatter_add_(0, index, torch.ones_like(index))
    counts = torch.cat([counts.new_zeros(1), counts[:num_held]])
    return _Groups(index.argsort(stable=True), counts.cumsum(0), ((counts + rows - 1) // rows).cumsum(0))


def _multiply(
    x: Tensor,
    weight: Tensor,
    output: Tensor,
    groups: _Groups,
    shares: Tensor,
    num_tiles: int,
    rows: int,
    back: bool,
) -> None:
    num_held, size, depth = weight.shape
    _grouped_matmul[(num_tiles, triton.cdiv(size, _COLUMNS))](
        x,
        weight,
        output,
        groups.order,
        groups.starts,
        groups.tiles,
        shares,
        num_held,
        size,
        depth,
        shares.shape[1],
        HELD=triton.next_power_of_2(num_held),
        ROWS=rows,
        COLUMNS=_COLUMNS,
        DEPTH=_DEPTH,
        BACK=back,
    )


@triton.jit(do_not_specialize=["num_held"])
def _grouped_matmul(
    x,
    weight,
    output,
    order,
    starts,
    tiles,
    shares,
    num_held,
    size,
    depth,
    num_places,
    HELD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    BACK: tl.constexpr,
):
    """One program per tile of one expert's rows and of columns.

    Forth, from rows of tokens to rows in the order of the experts; `BACK`, from those to rows of pairs, times
    their shares.
    """
    tile = tl.program_id(0)
    each = tl.arange(0, HELD)
    ends = tl.load(tiles + 1 + each, mask=each < num_held, other=0)
    expert = tl.sum(((ends <= tile) & (each < num_held)).to(tl.int32))
    if expert < num_held:
        within = tile - tl.load(tiles + expert)
        at = tl.load(starts + expert) + within * ROWS + tl.arange(0, ROWS)
        there = at < tl.load(starts + expert + 1)
        pair = tl.load(order + at, mask=there, other=0)
        row = at if BACK else pair // num_places
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        depths = tl.arange(0, DEPTH)
        matrix = weight + expert.to(tl.int64) * size * depth
        sums = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for k in range(0, depth, DEPTH):
            here = k + depths < depth
            a = tl.load(
                x + row[:, None] * depth + (k + depths)[None, :],
                mask=there[:, None] & here[None, :],
                other=0.0,
            )
            b = tl.load(
                matrix + columns[None, :] * depth + (k + depths)[:, None],
                mask=(columns < size)[None, :] & here[:, None],
                other=0.0,
            )
            sums = tl.dot(a, b, sums, input_precision="ieee")
        target = pair if BACK else at
        if BACK:
            sums *= tl.load(shares + pair, mask=there, other=0.0)[:, None]
        tl.store(
            output + target[:, None] * size + columns[None, :],
            sums,
            mask=there[:, None] & (columns < size)[None, :],
        )
