"""The inner loop of attention: online softmax over tiles of cached K and V (arXiv 1805.02867; 2205.14135)."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: N803

import triton
import triton.language as tl

from kernels.triton.fp8 import widen


@triton.jit
def attend_tiles(
    query,
    peak,
    total,
    attended,
    first,
    end,
    lowest,
    highest,
    row_positions,
    table,
    key_head,
    value_head,
    slot_stride,
    scale,
    soft_cap,
    window,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    FP8: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Takes the positions from `first` up to `end` into the running softmax of `query`'s rows.

    `query`: `[rows, BLOCK_D]`. `peak`, `total` `[rows]` and `attended` `[rows, BLOCK_D]`, float32: the
    greatest score so far (in powers of 2), the sum of weights and of weighted V relative to it; returned
    updated. With `MASKED`, nothing outside `lowest` up to `highest` is read, and a row sees only what is not
    after its position and inside `window`; without, every row sees every position.
    `table`: the sequence's block table; `key_head`, `value_head`: caches at the program's KV head.
    """
    dims = tl.arange(0, BLOCK_D)
    for start in range(first, end, BLOCK_N):
        positions = start + tl.arange(0, BLOCK_N)
        readable = (positions >= lowest) & (positions < highest)
        if MASKED:
            blocks = tl.load(table + positions // BLOCK_SIZE, mask=readable, other=0)
        else:
            blocks = tl.load(table + positions // BLOCK_SIZE)
        slots = blocks.to(tl.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
        key_where = key_head + slots[None, :] * slot_stride + dims[:, None]
        value_where = value_head + slots[:, None] * slot_stride + dims[None, :]
        # What is not read counts as 0: a weight of 0 times a NaN in an unused slot would be NaN.
        if MASKED:
            key = tl.load(key_where, mask=readable[None, :] & (dims < HEAD_DIM)[:, None], other=0.0)
        elif BLOCK_D != HEAD_DIM:
            key = tl.load(key_where, mask=(dims < HEAD_DIM)[:, None], other=0.0)
        else:
            key = tl.load(key_where)
        scores = tl.dot(query, widen(key, query.dtype, FP8), input_precision=PRECISION) * scale
        if HAS_SOFT_CAP:
            scores = soft_cap * _tanh(scores / soft_cap)
        scores = scores * 1.4426950408889634  # log2(e): exp2 is the instruction that GPUs have
        if MASKED:
            visible = readable[None, :] & (positions[None, :] <= row_positions[:, None])
            if HAS_WINDOW:
                visible = visible & (positions[None, :] > row_positions[:, None] - window)
            scores = tl.where(visible, scores, float("-inf"))

        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        # A row that has seen nothing yet: -inf - -inf would be NaN.
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(scores - base[:, None])
        fading = tl.exp2(peak - base)
        total = total * fading + tl.sum(weights, axis=1)
        peak = new_peak
        if MASKED:
            value = tl.load(value_where, mask=readable[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
        elif BLOCK_D != HEAD_DIM:
            value = tl.load(value_where, mask=(dims < HEAD_DIM)[None, :], other=0.0)
        else:
            value = tl.load(value_where)
        attended = tl.dot(
            weights.to(query.dtype),
            widen(value, query.dtype, FP8),
            acc=attended * fading[:, None],
            input_precision=PRECISION,
        )
    return peak, total, attended


@triton.jit
def _tanh(x):
    faded = tl.exp(-2.0 * tl.abs(x))
    magnitude = (1.0 - faded) / (1.0 + faded)
    return tl.where(x < 0, -magnitude, magnitude)
