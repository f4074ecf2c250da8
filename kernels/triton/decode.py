"""Attention of decode tokens, with the KV of a long sequence split over several programs.

Source: Flash-Decoding (Dao, Haziza, Massa, Sizov, 2023, crfm.stanford.edu/2023/10/12/flashdecoding.html).
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: N803

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.problem import UNALIGNED, VARYING, AttentionProblem
from kernels.triton.softmax import attend_tiles
from kernels.triton.tuning import AttentionConfig

SPLIT_LENGTH: Final = 256
"""Tokens of a split, as long as a sequence has no more than `MAX_SPLITS` of them; longer sequences have
longer splits instead. So a row's result depends on its own length and not on what else is in the batch."""
MAX_SPLITS: Final = 32


_merged: set[tuple[object, ...]] = set()


def attend_decodes(problem: AttentionProblem, config: AttentionConfig) -> None:
    """Fills the output rows of the sequences that have one token in this step.

    The number of splits is a parameter of the launch: as many as the longest sequence has by its length on
    the host, or under capture `MAX_SPLITS`, so that the graph serves any length. Each program finds its range
    from the length on the device; programs without one end at once.
    """
    batch = problem.batch
    num_seqs = len(batch.query_lens)
    longest = max(batch.host_seq_lens)
    if _capturing(problem.query):
        longest = MAX_SPLITS * SPLIT_LENGTH
    if problem.sliding_window is not None:
        # The first split starts at the border of the tile in which the window does.
        longest = min(longest, problem.sliding_window + config.block_n)
    splits = max(1, min(MAX_SPLITS, triton.cdiv(longest, SPLIT_LENGTH)))
    partial_shape = (num_seqs, problem.num_heads, splits) if splits > 1 else (1, 1, 1)
    partials = problem.query.new_empty(*partial_shape, problem.head_dim, dtype=torch.float32)
    weights = problem.query.new_empty(partial_shape, dtype=torch.float32)
    constants = problem.constants()
    ranges = {"SPLIT_LENGTH": SPLIT_LENGTH, "MAX_SPLITS": MAX_SPLITS, "BLOCK_N": config.block_n}
    _decode[(num_seqs, problem.num_kv_heads, splits)](
        *problem.tensors(),
        partials,
        weights,
        *problem.numbers(),
        **constants,
        **ranges,
        BLOCK_M=max(16, triton.next_power_of_2(problem.group)),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        enable_fp_fusion=True,
    )
    variant = (*constants.values(), config.block_n, problem.query.dtype)
    # The first launch compiles, which should not wait for the first sequence that is long; it merges nothing.
    if splits > 1 or variant not in _merged:
        _merged.add(variant)
        _merge[(num_seqs, problem.num_heads)](
            partials,
            weights,
            problem.output,
            batch.query_start,
            batch.seq_lens,
            problem.value_scale,
            problem.sliding_window or 0,
            splits,
            **{name: constants[name] for name in ("NUM_HEADS", "HEAD_DIM", "BLOCK_D", "HAS_WINDOW")},
            **ranges,
            num_warps=4,
            enable_fp_fusion=True,
        )


def _capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


@triton.jit
def _ranges(
    seq_len,
    window,
    HAS_WINDOW: tl.constexpr,
    SPLIT_LENGTH: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Of the last token: first visible position, where its splits start, how long and how many they are."""
    lowest = 0
    if HAS_WINDOW:
        lowest = tl.maximum(seq_len - window, 0)
    first = lowest // BLOCK_N * BLOCK_N
    length = tl.cdiv(tl.cdiv(seq_len - first, MAX_SPLITS), BLOCK_N) * BLOCK_N
    length = tl.maximum(length, SPLIT_LENGTH)
    return lowest, first, length, tl.cdiv(seq_len - first, length)


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=UNALIGNED)
def _decode(
    query,
    key_cache,
    value_cache,
    output,
    block_tables,
    query_start,
    seq_lens,
    partials,
    weights,
    query_token_stride,
    query_head_stride,
    slot_stride,
    table_stride,
    scale,
    value_scale,
    soft_cap,
    window,
    GROUP: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    FP8: tl.constexpr,
    PRECISION: tl.constexpr,
    SPLIT_LENGTH: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """One program per sequence, KV head and split; its rows are the query heads of the KV head."""
    sequence = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    start = tl.load(query_start + sequence)
    seq_len = tl.load(seq_lens + sequence)
    lowest, first, length, splits = _ranges(seq_len, window, HAS_WINDOW, SPLIT_LENGTH, MAX_SPLITS, BLOCK_N)
    # Padding has no splits, but one program that writes its zeros.
    if (tl.load(query_start + sequence + 1) - start != 1) | (split >= tl.maximum(splits, 1)):
        return

    rows = tl.arange(0, BLOCK_M)
    heads = kv_head * GROUP + rows
    dims = tl.arange(0, BLOCK_D)
    mask = (rows < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    token = start.to(tl.int64)
    where = query + token * query_token_stride + (heads * query_head_stride)[:, None] + dims[None, :]
    split_start = first + split * length
    split_end = tl.minimum(split_start + length, seq_len)
    peak, total, attended = attend_tiles(
        tl.load(where, mask=mask, other=0.0),
        tl.full([BLOCK_M], float("-inf"), tl.float32),
        tl.zeros([BLOCK_M], tl.float32),
        tl.zeros([BLOCK_M, BLOCK_D], tl.float32),
        split_start,
        split_end,
        lowest,
        seq_len,
        tl.full([BLOCK_M], 0, tl.int32) + seq_len,
        block_tables + sequence.to(tl.int64) * table_stride,
        key_cache + kv_head * HEAD_DIM,
        value_cache + kv_head * HEAD_DIM,
        slot_stride,
        scale,
        soft_cap,
        window,
        BLOCK_SIZE,
        HEAD_DIM,
        BLOCK_D,
        BLOCK_N,
        False,
        HAS_SOFT_CAP,
        FP8,
        PRECISION,
        True,
    )
    # A row of -inf scores alone yields zeros, not NaN.
    attended = attended / tl.where(total == 0, 1.0, total)[:, None]
    if splits <= 1:
        where = output + token * NUM_HEADS * HEAD_DIM + (heads * HEAD_DIM)[:, None] + dims[None, :]
        tl.store(where, attended * value_scale, mask=mask)
    else:
        row = (sequence.to(tl.int64) * NUM_HEADS + heads) * tl.num_programs(2) + split
        tl.store(partials + (row * HEAD_DIM)[:, None] + dims[None, :], attended, mask=mask)
        tl.store(weights + row, peak + tl.log2(total), mask=rows < GROUP)


@triton.jit(do_not_specialize=["launched_splits"], do_not_specialize_on_alignment=["query_start", "seq_lens"])
def _merge(
    partials,
    weights,
    output,
    query_start,
    seq_lens,
    value_scale,
    window,
    launched_splits,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SPLIT_LENGTH: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program per sequence and query head: the mean of its splits, by their sums of weights."""
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    start = tl.load(query_start + sequence)
    seq_len = tl.load(seq_lens + sequence)
    _, _, _, splits = _ranges(seq_len, window, HAS_WINDOW, SPLIT_LENGTH, MAX_SPLITS, BLOCK_N)
    if (tl.load(query_start + sequence + 1) - start != 1) | (splits <= 1):
        return

    row = (sequence.to(tl.int64) * NUM_HEADS + head) * launched_splits
    index = tl.arange(0, MAX_SPLITS)
    dims = tl.arange(0, BLOCK_D)
    # Sums of weights as powers of 2.
    sums = tl.load(weights + row + index, mask=index < splits, other=float("-inf"))
    peak = tl.max(sums, axis=0)
    shares = tl.exp2(sums - tl.where(peak == float("-inf"), 0.0, peak))
    total = tl.sum(shares, axis=0)
    mask = (index < splits)[:, None] & (dims < HEAD_DIM)[None, :]
    parts = tl.load(partials + ((row + index) * HEAD_DIM)[:, None] + dims[None, :], mask=mask, other=0.0)
    merged = tl.sum(parts * shares[:, None], axis=0) / tl.where(total == 0, 1.0, total)
    where = output + (start.to(tl.int64) * NUM_HEADS + head) * HEAD_DIM + dims
    tl.store(where, merged * value_scale, mask=dims < HEAD_DIM)
