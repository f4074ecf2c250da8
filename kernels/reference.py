"""The operations in plain torch: the oracle for every other implementation, and right on any device.

Floating dtypes are float32, bfloat16 or float16 (float64 in tests), the same for all tensors of a call.
`head_dim` and `size` count elements.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kernels.batch import AttentionBatch


def write_kv(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Stores each token's K and V in its slot, in place.

    `key`, `value`: `[num_tokens, num_kv_heads, head_dim]`. Caches: `[num_blocks, block_size, num_kv_heads,
    head_dim]`, contiguous. `slot_mapping`: `[num_tokens]` int64 (see `AttentionBatch`), no slot twice.
    Raises `RuntimeError` for caches that aren't contiguous and `IndexError` for a slot outside the cache.
    Source: PagedAttention (arXiv 2309.06180), section 5.1, fused reshape and block write.
    """
    heads = key_cache.shape[2:]
    key_cache.view(-1, *heads).index_copy_(0, slot_mapping, key)
    value_cache.view(-1, *heads).index_copy_(0, slot_mapping, value)


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
) -> Tensor:
    """Causal attention of every token in the batch over the cached K and V of its sequence, its own included.

    `query`: `[num_tokens, num_heads, head_dim]`. Caches: `[num_blocks, block_size, num_kv_heads, head_dim]`,
    with this step's K and V already written. Query head `h` reads KV head `h // (num_heads // num_kv_heads)`.
    `scale` multiplies the scores. `sliding_window` is how many tokens a token sees, itself included; `None`
    is all. Returns `[num_tokens, num_heads, head_dim]`. Raises `IndexError` for a block outside the cache.

    Slots that no token may see are never read, whatever they hold (a reused block may hold NaN).
    Source: PagedAttention (arXiv 2309.06180), section 4.1, equation 4.
    """
    output = torch.empty_like(query)
    decodes = [index for index, count in enumerate(batch.query_lens) if count == 1]
    if decodes:
        sequences = torch.tensor(decodes, device=query.device)
        tokens = batch.query_start[sequences].long()
        output[tokens] = _attend(
            query[tokens].unsqueeze(1),
            key_cache,
            value_cache,
            batch.block_tables[sequences],
            batch.seq_lens[sequences],
            max(batch.host_seq_lens[index] for index in decodes),
            scale,
            sliding_window,
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
                batch.host_seq_lens[index],
                scale,
                sliding_window,
            ).squeeze(0)
    return output


def _attend(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    scale: float,
    sliding_window: int | None,
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
        cache.view(-1, num_kv_heads * head_dim)
        .index_select(0, slots.flatten())
        .view(num_seqs, span, num_kv_heads, head_dim)
        for cache in (key_cache, value_cache)
    )

    distance = query_positions.unsqueeze(2) - positions.unsqueeze(1)
    mask = (distance >= 0) & (distance < window)
    # The query heads that share a KV head become rows of one matrix, so K and V aren't repeated.
    rows = (
        query.view(num_seqs, num_queries, num_kv_heads, group, head_dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
    )
    attended = F.scaled_dot_product_attention(
        rows,
        keys.transpose(1, 2),
        values.transpose(1, 2),
        attn_mask=mask.repeat(1, group, 1).unsqueeze(1),
        scale=scale,
    )
    by_head = attended.view(num_seqs, num_kv_heads, group, num_queries, head_dim)
    return by_head.permute(0, 3, 1, 2, 4).reshape(query.shape)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension: `[..., size]` with `weight` `[size]`.

    Normalises in float32, rounds to `x`'s dtype, then multiplies, as `transformers` does.
    Source: RMSNorm (arXiv 1910.07467), equation 4.
    """
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


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
