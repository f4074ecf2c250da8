"""The operations in plain torch: the oracle for every other implementation, and right on any device.

Floating dtypes are float32, bfloat16 or float16 (float64 in tests), the same for all tensors of a call. Only
caches may be `torch.float8_e4m3fn` instead: then their numbers times their scale are K or V. Other caches
take no scale but 1. `head_dim` and `size` count elements.
"""

from collections.abc import Sequence
from typing import Final

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kernels.batch import AttentionBatch

FP8: Final = torch.float8_e4m3fn
FP8_MAX: Final = 448.0


def write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """Stores each token's K and V in its slot, in place.

    `key`, `value`: `[num_tokens, num_kv_heads, head_dim]`. Caches: `[num_blocks, block_size, num_kv_heads,
    head_dim]`, contiguous. `slot_mapping`: `[num_tokens]` int64 (see `AttentionBatch`), no slot twice; a
    negative slot is that of a padding token, which is stored nowhere. FP8 caches store K and V divided by
    their scale, in float32, rounded to nearest, ties to even, and saturated at +-448.

    Raises `RuntimeError` for caches that aren't contiguous, `ValueError` for a scale that the caches can't
    have, and `IndexError` for a slot past the cache (on a GPU, which isn't waited for, the token is dropped).
    Source: PagedAttention (arXiv 2309.06180), section 5.1, fused reshape and block write; FP8 Formats for
    Deep Learning (arXiv 2209.05433), section 3.
    """
    heads = key_cache.shape[2:]
    if (slot_mapping < 0).any():
        written = slot_mapping >= 0
        key, value, slot_mapping = key[written], value[written], slot_mapping[written]
    for tokens, cache, scale in ((key, key_cache, key_scale), (value, value_cache, value_scale)):
        check_scale(cache, scale)
        slots = cache.view(-1, *heads)
        if cache.dtype == FP8:
            stored = (tokens.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)
            slots.view(torch.uint8).index_copy_(0, slot_mapping, stored.view(torch.uint8))
        else:
            slots.index_copy_(0, slot_mapping, tokens)


def route(x: Tensor, gate: Tensor, num_per_token: int, normalise: bool) -> tuple[Tensor, Tensor]:
    """Which experts each token takes, and by what shares; see `kernels.experts.Experts`.

    `x`: `[num_tokens, hidden_size]`; `gate`: `[num_experts, hidden_size]`. Returns shares, float32 (float64
    for float64), and experts, int64, both `[num_tokens, num_per_token]`.
    Source: Outrageously Large Neural Networks (arXiv 1701.06538); Mixtral of Experts (arXiv 2401.04088),
    section 2.1.
    """
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    scores = F.linear(x.to(wide), gate.to(wide)).softmax(-1)
    shares, experts = scores.topk(num_per_token)
    if normalise:
        shares = shares / shares.sum(-1, keepdim=True)
    return shares, experts


def mix_experts(
    x: Tensor, shares: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, first: int
) -> Tensor:
    """What the experts that are held make of their tokens, summed by share.

    `x`: `[num_tokens, hidden_size]`; `shares`, `experts`: as `route` gives them; `gate_up`, `down`, `first`:
    see `kernels.experts.Experts`. Experts that aren't held add nothing. Returns `[num_tokens, hidden_size]`,
    summed in float32 in the order of the experts.
    """
    mixed = torch.zeros_like(x, dtype=shares.dtype)
    for index, (gate_up_one, down_one) in enumerate(zip(gate_up, down, strict=True), start=first):
        tokens, places = (experts == index).nonzero(as_tuple=True)
        if len(tokens):
            made = F.linear(silu_and_mul(F.linear(x[tokens], gate_up_one)), down_one)
            mixed.index_add_(0, tokens, made.to(mixed.dtype) * shares[tokens, places].unsqueeze(-1))
    return mixed.to(x.dtype)


def check_scale(cache: Tensor, scale: float) -> None:
    """Raises `ValueError` unless `cache` can have `scale`: positive, and 1 if it isn't FP8."""
    if cache.dtype != FP8 and scale != 1:
        raise ValueError(f"a {cache.dtype} cache has scale {scale}: only {FP8} has one that isn't 1")
    if not scale > 0:
        raise ValueError(f"a cache has scale {scale}: it must be above 0")


def copy_blocks(
    source_caches: Sequence[tuple[Tensor, Tensor]],
    destination_caches: Sequence[tuple[Tensor, Tensor]],
    sources: Sequence[int],
    destinations: Sequence[int],
) -> None:
    """Copies whole blocks of each layer's K and V, in place: copy-on-write within a tier, swaps between two.

    Caches: per layer K and V, `[num_blocks, ...]`; both may be the same. `sources`, `destinations`: physical
    blocks, no destination twice. All sources are read before any destination is written. Between devices,
    blocks travel in one copy per cache, which the current stream orders before later kernels.
    Raises `IndexError` for a block outside the cache.
    Source: PagedAttention (arXiv 2309.06180), sections 4.4, 4.5 and 5.1, fused block copy and swap.
    """
    for source_layer, destination_layer in zip(source_caches, destination_caches, strict=True):
        for source, destination in zip(source_layer, destination_layer, strict=True):
            moved = source[torch.tensor(sources, device=source.device)].to(destination.device)
            destination.index_copy_(0, torch.tensor(destinations, device=destination.device), moved)


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
    """Causal attention of every token in the batch over the cached K and V of its sequence, its own included.

    `query`: `[num_tokens, num_heads, head_dim]`. Caches: `[num_blocks, block_size, num_kv_heads, head_dim]`,
    with this step's K and V already written. Query head `h` reads KV head `h // (num_heads // num_kv_heads)`.
    `scale` multiplies the scores. `sliding_window` is how many tokens a token sees, itself included; `None`
    is all. `soft_cap` bends each score `s` to `soft_cap * tanh(s / soft_cap)`. `key_scale` and `value_scale`
    are those of `write_kv`. Returns `[num_tokens, num_heads, head_dim]`: zeros for the token of a sequence of
    length 0, which is padding.

    Slots that no token may see are never read, whatever they hold (a reused block may hold NaN).
    Raises `IndexError` for a block outside the cache, on a CPU, and `ValueError` as `write_kv` does.
    Source: PagedAttention (arXiv 2309.06180), section 4.1, equation 4; Gemma 2 (arXiv 2408.00118), section 2,
    logit soft-capping.
    """
    check_scale(key_cache, key_scale)
    check_scale(value_cache, value_scale)
    scale *= key_scale
    output = torch.zeros_like(query)
    lens = batch.host_seq_lens
    decodes = [index for index, count in enumerate(batch.query_lens) if count == 1 and lens[index]]
    if decodes:
        sequences = torch.tensor(decodes, device=query.device)
        tokens = batch.query_start[sequences].long()
        output[tokens] = _attend(
            query[tokens].unsqueeze(1),
            key_cache,
            value_cache,
            batch.block_tables[sequences],
            batch.seq_lens[sequences],
            max(lens[index] for index in decodes),
            scale,
            sliding_window,
            soft_cap,
        ).squeeze(1)

    end = 0
    for index, count in enumerate(batch.query_lens):
        start, end = end, end + count
        if count > 1:
            output[start:end] = _attend(
                query[start:end].unsqueeze(0),
                key_cache,
                value_cache,
                batch.block_tables[index : index + 1],
                batch.seq_lens[index : index + 1],
                lens[index],
                scale,
                sliding_window,
                soft_cap,
            ).squeeze(0)
    return output if value_scale == 1 else (output.float() * value_scale).to(output.dtype)


def _attend(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
) -> Tensor:
    """Attention for sequences with equally many tokens: `[num_seqs, num_queries, num_heads, head_dim]`."""
    num_seqs, num_queries, num_heads, head_dim = query.shape
    block_size, num_kv_heads = key_cache.shape[1:3]
    group = num_heads // num_kv_heads
    # A window longer than the sequence hides nothing.
    window = min(sliding_window or max_seq_len, max_seq_len)

    ends = seq_lens.long().unsqueeze(1)
    query_positions = ends - num_queries + torch.arange(num_queries, device=query.device)
    first_visible = (query_positions[:, :1] - window + 1).clamp(min=0)

    # Token by token, and past a sequence's end its last token again, under a mask: so no stale slot is ever
    # read. To mask alone would not do, since a weight of 0 times a NaN in V is NaN again.
    span = min(max_seq_len, num_queries + window - 1)
    positions = first_visible + torch.arange(span, device=query.device)
    readable = positions.minimum(ends - 1)
    slots = block_tables.long().gather(1, readable // block_size) * block_size + readable % block_size
    keys, values = (
        _gather(cache, slots).view(num_seqs, span, num_kv_heads, head_dim).to(query.dtype)
        for cache in (key_cache, value_cache)
    )

    distance = query_positions.unsqueeze(2) - positions.unsqueeze(1)
    mask = (distance >= 0) & (distance < window)
    # The query heads that share a KV head become rows of one matrix, so K and V aren't repeated.
    rows = (
        query.view(num_seqs, num_queries, num_kv_heads, group, head_dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
    )
    keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    mask = mask.repeat(1, group, 1).unsqueeze(1)
    if soft_cap is None:
        attended = F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=scale)
    else:
        wide = torch.promote_types(query.dtype, torch.float32)
        scores = rows.to(wide) @ keys.to(wide).mT * scale
        scores = (soft_cap * torch.tanh(scores / soft_cap)).masked_fill(~mask, -torch.inf)
        attended = scores.softmax(-1).to(query.dtype) @ values
    by_head = attended.view(num_seqs, num_kv_heads, group, num_queries, head_dim)
    return by_head.permute(0, 3, 1, 2, 4).reshape(query.shape)


def _gather(cache: Tensor, slots: Tensor) -> Tensor:
    """Rows `[slots.numel(), num_kv_heads * head_dim]` of a cache; torch can't index FP8 on every device."""
    rows = cache.view(torch.uint8) if cache.dtype == FP8 else cache
    return rows.flatten(0, 1).flatten(1).index_select(0, slots.flatten()).view(cache.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension: `[..., size]` with `weight` `[size]`.

    Normalises in float32, rounds to `x`'s dtype, then multiplies, as `transformers` does.
    Source: RMSNorm (arXiv 1910.07467), equation 4.
    """
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`rms_norm` of `x + residual`, and that sum, rounded to their dtype: `(normed, new_residual)`.

    `x`, `residual`: `[..., size]`, with `weight` `[size]`. Consumes `residual`: the sum may be written in its
    place, so read only what is returned.
    """
    residual = residual.add_(x)
    return rms_norm(residual, weight, eps), residual


def rotary_embedding(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotates the pair (element `i`, element `i + head_dim / 2`) of every head by its token's angle `i`.

    `query`: `[num_tokens, num_heads, head_dim]`, `key`: `[num_tokens, num_kv_heads, head_dim]`, `cos` and
    `sin`: `[num_tokens, head_dim / 2]`. Returns new tensors.
    Source: RoFormer (arXiv 2104.09864), section 3.4.2, in the half-rotation order of `transformers`.
    """
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)

    def rotate(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    return rotate(query), rotate(key)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` of `[num_tokens, 2 * size]`, gate first; returns `[num_tokens, size]`.

    Source: GLU variants (arXiv 2002.05202), SwiGLU.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
