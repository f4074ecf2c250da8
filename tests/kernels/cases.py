"""Problems for the attention kernels, with what float64 makes of them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kernels import AttentionBatch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Where the Triton kernels are tested: compiled on a GPU, or interpreted."""
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class AttentionCase:
    """Arguments of `paged_attention`, and what float64 makes of them."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    batch: AttentionBatch
    window: int | None
    soft_cap: float | None
    key_scale: float
    value_scale: float
    expected: Tensor

    def attend(self, implementation: ModuleType) -> Tensor:
        scale = self.query.shape[-1] ** -0.5
        attended: Tensor = implementation.paged_attention(
            self.query,
            self.key_cache,
            self.value_cache,
            self.batch,
            scale,
            self.window,
            self.soft_cap,
            self.key_scale,
            self.value_scale,
        )
        return attended

    def error(self, result: Tensor) -> float:
        return (result.double() - self.expected).abs().max().item()


def attention_case(
    lens: Sequence[tuple[int, int]],
    num_kv_heads: int = 2,
    group: int = 2,
    head_dim: int = 8,
    block_size: int = 16,
    window: int | None = None,
    soft_cap: float | None = None,
    dtype: torch.dtype = torch.float32,
    fp8: bool = False,
    strided: bool = False,
    garbage: float = math.nan,
    device: str = "cpu",
) -> AttentionCase:
    """Sequences of (query tokens, all tokens) in shuffled blocks of a pool full of garbage.

    Garbage stays in every unused slot, and in those of tokens that the window hides from all queries.
    """
    generator = torch.Generator().manual_seed(len(lens) + num_kv_heads)
    widest = max(-(-total // block_size) for _, total in lens)
    num_blocks = len(lens) * widest + 2
    key_scale, value_scale = (0.02, 0.5) if fp8 else (1.0, 1.0)
    scales = (key_scale, value_scale)
    cache_shape = (num_blocks, block_size, num_kv_heads, head_dim)
    wide_caches = [torch.full(cache_shape, garbage, dtype=torch.float64) for _ in scales]
    free: list[int] = torch.randperm(num_blocks, generator=generator).tolist()
    tables, queries, expected = [], [], []
    for count, total in lens:
        blocks = [free.pop() for _ in range(-(-total // block_size))]
        tables.append(blocks + [2**31 - 1] * (widest - len(blocks)))
        query = torch.randn(count, num_kv_heads * group, head_dim, generator=generator, dtype=torch.float64)
        # Rounded first, so that the definition sees the same numbers as the kernel.
        query = query.to(dtype).double()
        shape = (total, num_kv_heads, head_dim)
        keys, values = (
            (torch.randn(shape, generator=generator, dtype=torch.float64) / scale)
            .to(FP8 if fp8 else dtype)
            .double()
            for scale in scales
        )
        for position in range(max(0, total - count + 1 - (window or total)), total):
            block, offset = blocks[position // block_size], position % block_size
            wide_caches[0][block, offset] = keys[position]
            wide_caches[1][block, offset] = values[position]
        queries.append(query)
        expected.append(
            attention_by_definition(query, keys * key_scale, values * value_scale, window, soft_cap)
        )
    batch = AttentionBatch.build(
        torch.tensor(tables, dtype=torch.int32, device=device),
        [q for q, _ in lens],
        [n for _, n in lens],
        block_size,
    )
    query = torch.cat(queries).to(device, dtype)
    if strided:
        # As a slice of Q, K and V side by side.
        padded = query.new_full((len(query), query.shape[1] + 2 * num_kv_heads, head_dim), math.nan)
        padded[:, : query.shape[1]] = query
        query = padded[:, : query.shape[1]]
    caches = [cache.to(FP8 if fp8 else dtype).to(device) for cache in wide_caches]
    return AttentionCase(
        query,
        caches[0],
        caches[1],
        batch,
        window,
        soft_cap,
        key_scale,
        value_scale,
        torch.cat(expected).to(device),
    )


def attention_by_definition(
    query: Tensor, keys: Tensor, values: Tensor, window: int | None, soft_cap: float | None
) -> Tensor:
    count, num_heads, head_dim = query.shape
    group = num_heads // keys.shape[1]
    output = torch.empty_like(query)
    for row in range(count):
        position = len(keys) - count + row
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(num_heads):
            seen = slice(first, position + 1)
            scores = keys[seen, head // group] @ query[row, head] / math.sqrt(head_dim)
            if soft_cap is not None:
                scores = soft_cap * (scores / soft_cap).tanh()
            output[row, head] = scores.softmax(0) @ values[seen, head // group]
    return output


def pairwise(choices: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Few combinations in which any two values of different parameters meet."""
    names = list(choices)

    def pairs(combination: dict[str, Any]) -> set[tuple[str, int, str, int]]:
        index = {name: choices[name].index(combination[name]) for name in names}
        return {(a, index[a], b, index[b]) for a, b in combinations(names, 2)}

    missing = {
        (a, i, b, j)
        for a, b in combinations(names, 2)
        for i, j in product(range(len(choices[a])), range(len(choices[b])))
    }
    chosen = []
    while missing:
        name_a, i, name_b, j = min(missing)
        best = {name: choices[name][0] for name in names}
        best[name_a], best[name_b] = choices[name_a][i], choices[name_b][j]
        for name in names:
            if name not in (name_a, name_b):
                options = [{**best, name: value} for value in choices[name]]
                best = max(options, key=lambda option: len(pairs(option) & missing))
        missing -= pairs(best)
        chosen.append(best)
    return chosen
