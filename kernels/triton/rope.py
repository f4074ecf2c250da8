"""Rotary position embedding of Q and K in one launch."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: N803

import torch
import triton
import triton.language as tl
from torch import Tensor

_ELEMENTS = 2048


def rotary_embedding(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """See `kernels.reference.rotary_embedding`; rounds once, at the end.

    `query` and `key` may be strided, but for their last dimension; the results are contiguous.
    """
    query, key = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key))
    cos, sin = cos.contiguous(), sin.contiguous()
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[1]
    rotated_query = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    rotated_key = torch.empty(key.shape, dtype=key.dtype, device=key.device)
    if not num_tokens:
        return rotated_query, rotated_key
    half = triton.next_power_of_2(head_dim // 2)
    block_h = min(triton.next_power_of_2(max(num_heads, num_kv_heads)), max(1, _ELEMENTS // (2 * half)))
    query_programs = triton.cdiv(num_heads, block_h)
    _rotate[(num_tokens, query_programs + triton.cdiv(num_kv_heads, block_h))](
        query,
        key,
        cos,
        sin,
        rotated_query,
        rotated_key,
        query.stride(0),
        query.stride(1),
        key.stride(0),
        key.stride(1),
        query_programs,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF=head_dim // 2,
        BLOCK_H=block_h,
        BLOCK_HALF=half,
        enable_fp_fusion=True,
    )
    return rotated_query, rotated_key


@triton.jit
def _rotate(
    query,
    key,
    cos,
    sin,
    rotated_query,
    rotated_key,
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    query_programs,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """One program per token and `BLOCK_H` heads: first those of the query, then those of the key."""
    token = tl.program_id(0).to(tl.int64)
    program = tl.program_id(1)
    dims = tl.arange(0, BLOCK_HALF)
    cosines = tl.load(cos + token * HALF + dims, mask=dims < HALF, other=0.0).to(tl.float32)
    sines = tl.load(sin + token * HALF + dims, mask=dims < HALF, other=0.0).to(tl.float32)
    if program < query_programs:
        _rotate_heads(
            query + token * query_token_stride,
            rotated_query + token * NUM_HEADS * 2 * HALF,
            query_head_stride,
            program,
            cosines,
            sines,
            NUM_HEADS,
            HALF,
            BLOCK_H,
            BLOCK_HALF,
        )
    else:
        _rotate_heads(
            key + token * key_token_stride,
            rotated_key + token * NUM_KV_HEADS * 2 * HALF,
            key_head_stride,
            program - query_programs,
            cosines,
            sines,
            NUM_KV_HEADS,
            HALF,
            BLOCK_H,
            BLOCK_HALF,
        )


@triton.jit
def _rotate_heads(
    x,
    rotated,
    head_stride,
    program,
    cosines,
    sines,
    NUM_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    heads = program * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    dims = tl.arange(0, BLOCK_HALF)[None, :]
    mask = (heads < NUM_HEADS) & (dims < HALF)
    first = tl.load(x + heads * head_stride + dims, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x + heads * head_stride + HALF + dims, mask=mask, other=0.0).to(tl.float32)
    where = rotated + heads * 2 * HALF + dims
    tl.store(where, first * cosines[None, :] - second * sines[None, :], mask=mask)
    tl.store(where + HALF, second * cosines[None, :] + first * sines[None, :], mask=mask)
