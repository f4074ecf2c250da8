"""The reference kernels against definitions written out in float64."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import kernels
from kernels import AttentionBatch

HEAD_DIM = 8
BLOCK_SIZE = 16


class Case(NamedTuple):
    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    batch: AttentionBatch
    expected: Tensor


def make_case(
    lens: Sequence[tuple[int, int]],
    num_kv_heads: int = 2,
    group: int = 2,
    window: int | None = None,
    dtype: torch.dtype = torch.float32,
    garbage: float = math.nan,
) -> Case:
    """Sequences of (query tokens, all tokens) in shuffled blocks of a pool full of garbage.

    Garbage stays in every unused slot, and in those of tokens that the window hides from all queries.
    """
    generator = torch.Generator().manual_seed(len(lens) + num_kv_heads)
    widest = max(-(-total // BLOCK_SIZE) for _, total in lens)
    num_blocks = len(lens) * widest + 2
    caches = [
        torch.full((num_blocks, BLOCK_SIZE, num_kv_heads, HEAD_DIM), garbage, dtype=dtype) for _ in "kv"
    ]
    free: list[int] = torch.randperm(num_blocks, generator=generator).tolist()
    tables, queries, expected = [], [], []
    for count, total in lens:
        blocks = [free.pop() for _ in range(-(-total // BLOCK_SIZE))]
        tables.append(blocks + [2**31 - 1] * (widest - len(blocks)))
        query = torch.randn(count, num_kv_heads * group, HEAD_DIM, generator=generator, dtype=torch.float64)
        # Rounded first, so that the definition sees the same numbers as the kernel.
        keys, values = (
            torch.randn(total, num_kv_heads, HEAD_DIM, generator=generator, dtype=torch.float64).to(dtype)
            for _ in "kv"
        )
        for position in range(max(0, total - count + 1 - (window or total)), total):
            block, offset = blocks[position // BLOCK_SIZE], position % BLOCK_SIZE
            caches[0][block, offset] = keys[position]
            caches[1][block, offset] = values[position]
        queries.append(query.to(dtype))
        expected.append(attention_by_definition(queries[-1].double(), keys.double(), values.double(), window))
    batch = AttentionBatch.build(
        torch.tensor(tables, dtype=torch.int32), [q for q, _ in lens], [n for _, n in lens], BLOCK_SIZE
    )
    return Case(torch.cat(queries), caches[0], caches[1], batch, torch.cat(expected))


def attention_by_definition(query: Tensor, keys: Tensor, values: Tensor, window: int | None) -> Tensor:
    count, num_heads, _ = query.shape
    group = num_heads // keys.shape[1]
    output = torch.empty_like(query)
    for row in range(count):
        position = len(keys) - count + row
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(num_heads):
            seen = slice(first, position + 1)
            scores = keys[seen, head // group] @ query[row, head] / math.sqrt(HEAD_DIM)
            output[row, head] = scores.softmax(0) @ values[seen, head // group]
    return output


def attend(case: Case, window: int | None = None) -> Tensor:
    return kernels.paged_attention(
        case.query, case.key_cache, case.value_cache, case.batch, 1 / math.sqrt(HEAD_DIM), window
    )


LENGTHS = [1, 2, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 2 * BLOCK_SIZE, 2 * BLOCK_SIZE + 1, 50]


@pytest.mark.parametrize("window", [None, 1, 2, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 1000])
@pytest.mark.parametrize("total", LENGTHS)
def test_attention_of_one_sequence_at_block_borders(total: int, window: int | None) -> None:
    for count in sorted({1, 2, BLOCK_SIZE, total - 1, total} & set(range(1, total + 1))):
        case = make_case([(count, total)], window=window, dtype=torch.float64)
        torch.testing.assert_close(attend(case, window), case.expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 3e38])
@pytest.mark.parametrize("window", [None, 1, BLOCK_SIZE, 20])
@pytest.mark.parametrize(("num_kv_heads", "group"), [(1, 1), (1, 4), (2, 1), (3, 2)])
def test_attention_of_a_mixed_batch(
    num_kv_heads: int, group: int, window: int | None, garbage: float
) -> None:
    lens = [
        (1, 50),
        (7, 7),
        (1, 1),
        (BLOCK_SIZE, 40),
        (1, BLOCK_SIZE),
        (2, BLOCK_SIZE + 1),
        (1, BLOCK_SIZE + 1),
    ]
    case = make_case(lens, num_kv_heads, group, window, garbage=garbage)
    torch.testing.assert_close(attend(case, window).double(), case.expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)], ids=str)
def test_attention_in_half_precision(dtype: torch.dtype, tolerance: float) -> None:
    case = make_case([(1, 50), (20, 33), (1, 3)], dtype=dtype)
    result = attend(case)
    assert result.dtype == dtype
    torch.testing.assert_close(result.double(), case.expected, atol=tolerance, rtol=0)


def test_a_batch_knows_where_its_tokens_go() -> None:
    tables = torch.tensor([[5, 2, 9], [7, 0, 0]], dtype=torch.int32)
    batch = AttentionBatch.build(tables, query_lens=[3, 1], seq_lens=[10, 2], block_size=4)

    assert batch.positions.tolist() == [7, 8, 9, 1]
    assert batch.slot_mapping.tolist() == [2 * 4 + 3, 9 * 4 + 0, 9 * 4 + 1, 7 * 4 + 1]
    assert batch.query_start.tolist() == [0, 3, 4]
    assert batch.seq_lens.tolist() == [10, 2]
    assert (batch.query_lens, batch.host_seq_lens) == ((3, 1), (10, 2))
    dtypes = [batch.positions, batch.slot_mapping, batch.query_start, batch.seq_lens]
    assert [tensor.dtype for tensor in dtypes] == [torch.int64, torch.int64, torch.int32, torch.int32]


def test_write_kv_fills_its_slots_and_no_other() -> None:
    key, value = torch.randn(2, 2, 1, HEAD_DIM)
    key_cache, value_cache = torch.zeros(2, 3, 4, 1, HEAD_DIM)
    kernels.write_kv(key, value, key_cache, value_cache, torch.tensor([2 * 4 + 3, 1]))

    for cache, written in ((key_cache, key), (value_cache, value)):
        assert cache[2, 3].equal(written[0])
        assert cache[0, 1].equal(written[1])
        assert cache.count_nonzero() == written.numel()


def test_write_kv_refuses_a_slot_outside_the_cache() -> None:
    key, cache = torch.zeros(1, 1, HEAD_DIM), torch.zeros(3, 4, 1, HEAD_DIM)
    with pytest.raises(IndexError):
        kernels.write_kv(key, key, cache, cache.clone(), torch.tensor([12]))


def test_copy_blocks_reads_every_source_before_it_writes() -> None:
    before = [(torch.randn(4, 2, 1, 3), torch.randn(4, 2, 1, 3)) for _ in range(2)]
    after = [(k.clone(), v.clone()) for k, v in before]
    kernels.copy_blocks(after, after, [0, 1, 0], [1, 2, 3])

    for old_layer, new_layer in zip(before, after, strict=True):
        for old, new in zip(old_layer, new_layer, strict=True):
            assert new.equal(old[[0, 0, 1, 0]])


def test_copy_blocks_moves_between_two_pools() -> None:
    device = [(torch.randn(4, 2, 1, 3), torch.randn(4, 2, 1, 3)) for _ in range(2)]
    host = [(torch.zeros(2, 2, 1, 3), torch.zeros(2, 2, 1, 3)) for _ in range(2)]

    kernels.copy_blocks(device, host, [3, 1], [0, 1])

    for device_layer, host_layer in zip(device, host, strict=True):
        for source, destination in zip(device_layer, host_layer, strict=True):
            assert destination.equal(source[[3, 1]])


def test_rms_norm_rounds_before_the_weight() -> None:
    x, weight = torch.randn(3, 16, dtype=torch.bfloat16) * 50, torch.randn(16, dtype=torch.bfloat16)
    wide = x.double()
    normalised = wide / (wide.square().mean(-1, keepdim=True) + 0.5).sqrt()
    expected = (normalised.to(torch.bfloat16).double() * weight.double()).to(torch.bfloat16)
    assert kernels.rms_norm(x, weight, 0.5).equal(expected)


def test_rotary_embedding_rotates_pairs_half_a_head_apart() -> None:
    angles = torch.rand(5, HEAD_DIM // 2, dtype=torch.float64) * 6
    query, key = (
        torch.randn(5, 4, HEAD_DIM, dtype=torch.float64),
        torch.randn(5, 2, HEAD_DIM, dtype=torch.float64),
    )
    turns = torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
    for rotated, x in zip(
        kernels.rotary_embedding(query, key, angles.cos(), angles.sin()), (query, key), strict=True
    ):
        expected = torch.complex(x[..., : HEAD_DIM // 2], x[..., HEAD_DIM // 2 :]) * turns
        torch.testing.assert_close(rotated, torch.cat((expected.real, expected.imag), dim=-1))


def test_silu_and_mul_takes_the_gate_first() -> None:
    gate, up = torch.randn(2, 3, 6, dtype=torch.float64)
    expected = gate / (1 + (-gate).exp()) * up
    torch.testing.assert_close(kernels.silu_and_mul(torch.cat((gate, up), dim=-1)), expected)
