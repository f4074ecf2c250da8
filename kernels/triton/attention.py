"""Attention of mixed batches: prefill chunks here, decode tokens in `kernels.triton.decode`."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: N803

import triton
import triton.language as tl
from torch import Tensor

from kernels.batch import AttentionBatch
from kernels.reference import check_scale
from kernels.triton.decode import attend_decodes
from kernels.triton.problem import UNALIGNED, VARYING, AttentionProblem
from kernels.triton.softmax import attend_tiles
from kernels.triton.tuning import AttentionConfig


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: AttentionBatch,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> Tensor:
    """See `kernels.reference.paged_attention`.

    Sequences with one token in this step go through the decode kernel, others through the prefill kernel;
    lengths on the host only size the grids. Tiles and splits are cut by a sequence's own positions, so what a
    row yields doesn't depend on its neighbours in the batch, nor on where its prompt was cut in chunks (but a
    chunk of one token is a decode, which sums in another order).

    CUDA graphs: a captured batch of decodes may be replayed with other tensors of the same shapes, whatever
    their `seq_lens` (captured grids are the widest, see `decode`). Sequences of length 0 are padding.

    Raises `ValueError` for a block size that is no multiple of 8, heads of more than 256 elements, or caches
    that aren't contiguous.
    """
    check_scale(key_cache, key_scale)
    check_scale(value_cache, value_scale)
    problem = AttentionProblem.of(
        query, key_cache, value_cache, batch, scale * key_scale, value_scale, sliding_window, soft_cap
    )
    if not query.numel():
        return problem.output
    if 1 in batch.query_lens:
        attend_decodes(problem, problem.config("decode"))
    if max(batch.query_lens) > 1:
        attend_prefills(problem, problem.config("prefill"))
    return problem.output


def attend_prefills(problem: AttentionProblem, config: AttentionConfig) -> None:
    """Fills the output rows of the sequences that have several tokens in this step."""
    block_m = max(config.block_m, triton.next_power_of_2(problem.group))
    block_q = block_m // problem.group
    batch = problem.batch
    # A bound that needs no count per sequence: a program past the end of its sequence has nothing to do.
    programs = len(problem.query) // block_q + len(batch.query_lens)
    _prefill[(programs, problem.num_kv_heads)](
        *problem.tensors(),
        *problem.numbers(),
        len(batch.query_lens),
        **problem.constants(),
        BLOCK_M=block_m,
        BLOCK_Q=block_q,
        BLOCK_N=config.block_n,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        enable_fp_fusion=True,
    )


@triton.jit(do_not_specialize=[*VARYING, "num_seqs"], do_not_specialize_on_alignment=UNALIGNED)
def _prefill(
    query,
    key_cache,
    value_cache,
    output,
    block_tables,
    query_start,
    seq_lens,
    query_token_stride,
    query_head_stride,
    slot_stride,
    table_stride,
    scale,
    value_scale,
    soft_cap,
    window,
    num_seqs,
    GROUP: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    FP8: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program per `BLOCK_Q` tokens of a sequence and KV head; its rows are tokens x query heads."""
    # The last tokens of a chunk see most, so they start first.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    # Sequence i owns the programs from query_start[i] // BLOCK_Q + i on, enough for any alignment.
    sequence: tl.int32 = 0
    after = num_seqs
    while after - sequence > 1:
        middle = (sequence + after) // 2
        if tl.load(query_start + middle) // BLOCK_Q + middle <= program:
            sequence = middle
        else:
            after = middle
    start = tl.load(query_start + sequence)
    query_len = tl.load(query_start + sequence + 1) - start
    first_query = (program - start // BLOCK_Q - sequence) * BLOCK_Q
    if (query_len <= 1) | (first_query >= query_len):
        return

    rows = tl.arange(0, BLOCK_M)
    queries = first_query + rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    dims = tl.arange(0, BLOCK_D)
    mask = ((rows < BLOCK_Q * GROUP) & (queries < query_len))[:, None] & (dims < HEAD_DIM)[None, :]
    tokens = (start + queries).to(tl.int64)
    where = query + (tokens * query_token_stride + heads * query_head_stride)[:, None] + dims[None, :]
    rows_of_query = tl.load(where, mask=mask, other=0.0)

    context = tl.load(seq_lens + sequence) - query_len
    positions = context + queries
    first_position = context + first_query
    last_position = context + tl.minimum(first_query + BLOCK_Q, query_len) - 1
    # What any row sees; then, in whole tiles, what every row sees. Tiles start at multiples of BLOCK_N, so
    # that a row's sums don't depend on its program.
    lowest = 0
    seen_by_all = 0
    if HAS_WINDOW:
        lowest = tl.maximum(first_position - window + 1, 0)
        seen_by_all = tl.cdiv(tl.maximum(last_position - window + 1, 0), BLOCK_N) * BLOCK_N
    highest = last_position + 1
    diagonal = tl.maximum((first_position + 1) // BLOCK_N * BLOCK_N, seen_by_all)

    table = block_tables + tl.cast(sequence, tl.int64) * table_stride
    key_head = key_cache + kv_head * HEAD_DIM
    value_head = value_cache + kv_head * HEAD_DIM
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    attended = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if HAS_WINDOW:
        peak, total, attended = attend_tiles(
            rows_of_query,
            peak,
            total,
            attended,
            lowest // BLOCK_N * BLOCK_N,
            tl.minimum(seen_by_all, highest),
            lowest,
            highest,
            positions,
            table,
            key_head,
            value_head,
            slot_stride,
            scale,
            soft_cap,
            window,
            BLOCK_SIZE,
            HEAD_DIM,
            BLOCK_D,
            BLOCK_N,
            HAS_WINDOW,
            HAS_SOFT_CAP,
            FP8,
            PRECISION,
            True,
        )
    peak, total, attended = attend_tiles(
        rows_of_query,
        peak,
        total,
        attended,
        seen_by_all,
        diagonal,
        lowest,
        highest,
        positions,
        table,
        key_head,
        value_head,
        slot_stride,
        scale,
        soft_cap,
        window,
        BLOCK_SIZE,
        HEAD_DIM,
        BLOCK_D,
        BLOCK_N,
        HAS_WINDOW,
        HAS_SOFT_CAP,
        FP8,
        PRECISION,
        False,
    )
    peak, total, attended = attend_tiles(
        rows_of_query,
        peak,
        total,
        attended,
        diagonal,
        highest,
        lowest,
        highest,
        positions,
        table,
        key_head,
        value_head,
        slot_stride,
        scale,
        soft_cap,
        window,
        BLOCK_SIZE,
        HEAD_DIM,
        BLOCK_D,
        BLOCK_N,
        HAS_WINDOW,
        HAS_SOFT_CAP,
        FP8,
        PRECISION,
        True,
    )
    # A row of -inf scores alone yields zeros, not NaN.
    attended = attended * (value_scale / tl.where(total == 0, 1.0, total))[:, None]
    where = output + ((tokens * NUM_HEADS + heads) * HEAD_DIM)[:, None] + dims[None, :]
    tl.store(where, attended, mask=mask)
