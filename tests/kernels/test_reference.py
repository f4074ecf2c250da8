"""The reference kernels against definitions written out in float64."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels import AttentionBatch, reference
from tests.kernels.cases import attention_case

HEAD_DIM = 8
BLOCK_SIZE = 16
FP8 = torch.float8_e4m3fn


LENGTHS = [1, 2, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 2 * BLOCK_SIZE, 2 * BLOCK_SIZE + 1, 50]


@pytest.mark.parametrize("window", [None, 1, 2, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 1000])
@pytest.mark.parametrize("total", LENGTHS)
def test_attention_of_one_sequence_at_block_borders(total: int, window: int | None) -> None:
    for count in sorted({1, 2, BLOCK_SIZE, total - 1, total} & set(range(1, total + 1))):
        case = attention_case([(count, total)], window=window, dtype=torch.float64)
        assert case.error(case.attend(reference)) < 1e-12


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
    case = attention_case(lens, num_kv_heads, group, window=window, garbage=garbage)
    assert case.error(case.attend(reference)) < 2e-6


@pytest.mark.parametrize("soft_cap", [0.5, 30.0])
def test_attention_with_capped_scores(soft_cap: float) -> None:
    lens = [(1, 50), (7, 7), (1, 1), (16, 40)]
    case = attention_case(lens, window=20, soft_cap=soft_cap, dtype=torch.float64)
    assert case.error(case.attend(reference)) < 1e-12


@pytest.mark.parametrize("soft_cap", [None, 3.0])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)], ids=str)
def test_attention_to_fp8_caches(dtype: torch.dtype, tolerance: float, soft_cap: float | None) -> None:
    case = attention_case([(1, 50), (20, 33), (1, 3)], soft_cap=soft_cap, dtype=dtype, fp8=True)
    result = case.attend(reference)
    assert result.dtype == dtype
    assert case.error(result) < tolerance


def test_attention_of_padding_is_zero() -> None:
    case = attention_case([(1, 50), (1, 20)])
    batch = replace(case.batch, seq_lens=torch.tensor([50, 0]), host_seq_lens=(50, 0))
    result = replace(case, batch=batch).attend(reference)
    torch.testing.assert_close(result[0].double(), case.expected[0], atol=2e-6, rtol=0)
    assert result[1].count_nonzero() == 0


def test_decodes_are_laid_out_on_the_device_as_on_the_host() -> None:
    tables = torch.tensor([[5, 2, 7], [3, -7, -7], [1, 6, -7]], dtype=torch.int32)
    lens = [9, 4, 5]
    expected = AttentionBatch.build(tables, [1, 1, 1], lens, block_size=4)
    result = AttentionBatch.of_decodes(tables, torch.tensor(lens), 4, lens)
    for name, value in vars(expected).items():
        other = getattr(result, name)
        assert value.equal(other) if isinstance(value, Tensor) else value == other, name


def test_padding_among_decodes_has_no_slot() -> None:
    tables = torch.tensor([[5, 2], [-7, -7]], dtype=torch.int32)
    batch = AttentionBatch.of_decodes(tables, torch.tensor([5, 0]), 4, [5, 0])
    assert (batch.slot_mapping.tolist(), batch.positions.tolist()) == ([8, -1], [4, 0])


def test_a_scale_needs_an_fp8_cache() -> None:
    case = attention_case([(1, 3)])
    with pytest.raises(ValueError, match=r"a torch\.float32 cache has scale 2\.0"):
        replace(case, value_scale=2.0).attend(reference)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)], ids=str)
def test_attention_in_half_precision(dtype: torch.dtype, tolerance: float) -> None:
    case = attention_case([(1, 50), (20, 33), (1, 3)], dtype=dtype)
    result = case.attend(reference)
    assert result.dtype == dtype
    assert case.error(result) < tolerance


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
    reference.write_kv(key, value, key_cache, value_cache, torch.tensor([2 * 4 + 3, 1]))

    for cache, written in ((key_cache, key), (value_cache, value)):
        assert cache[2, 3].equal(written[0])
        assert cache[0, 1].equal(written[1])
        assert cache.count_nonzero() == written.numel()


def test_write_kv_refuses_a_slot_outside_the_cache() -> None:
    key, cache = torch.zeros(1, 1, HEAD_DIM), torch.zeros(3, 4, 1, HEAD_DIM)
    with pytest.raises(IndexError):
        reference.write_kv(key, key, cache, cache.clone(), torch.tensor([12]))


def test_write_kv_passes_over_padding() -> None:
    key, cache = torch.ones(3, 1, HEAD_DIM), torch.zeros(3, 4, 1, HEAD_DIM)
    reference.write_kv(key, key, cache, cache.clone(), torch.tensor([-1, 5, -1]))
    assert cache.sum(-1).flatten().nonzero().tolist() == [[5]]


def test_write_kv_scales_rounds_and_saturates_fp8() -> None:
    # In places of 2**-9, the smallest subnormal: ties go to even.
    key = torch.tensor([1e6, -1e6, math.inf, 448, 460, 17, 0.5 / 512, 1.5 / 512]).view(1, 1, HEAD_DIM)
    key_cache = torch.zeros(3, 4, 1, HEAD_DIM, dtype=FP8)
    value_cache = key_cache.clone()
    reference.write_kv(key * 2, key / 4, key_cache, value_cache, torch.tensor([6]), 2.0, 0.25)
    for cache in (key_cache, value_cache):
        assert cache[1, 2, 0].float().tolist() == [448, -448, 448, 448, 448, 16, 0, 2 / 512]


def test_write_kv_refuses_a_scale_that_the_cache_can_not_have() -> None:
    key, cache = torch.zeros(1, 1, HEAD_DIM), torch.zeros(3, 4, 1, HEAD_DIM)
    with pytest.raises(ValueError, match=r"a torch\.float32 cache has scale 2\.0"):
        reference.write_kv(key, key, cache, cache.clone(), torch.tensor([1]), key_scale=2.0)
    quantised = cache.to(FP8)
    with pytest.raises(ValueError, match="above 0"):
        reference.write_kv(key, key, quantised, quantised.clone(), torch.tensor([1]), value_scale=0.0)


def test_copy_blocks_reads_every_source_before_it_writes() -> None:
    before = [(torch.randn(4, 2, 1, 3), torch.randn(4, 2, 1, 3)) for _ in range(2)]
    after = [(k.clone(), v.clone()) for k, v in before]
    reference.copy_blocks(after, after, [0, 1, 0], [1, 2, 3])

    for old_layer, new_layer in zip(before, after, strict=True):
        for old, new in zip(old_layer, new_layer, strict=True):
            assert new.equal(old[[0, 0, 1, 0]])


def test_copy_blocks_moves_between_two_pools() -> None:
    device = [(torch.randn(4, 2, 1, 3), torch.randn(4, 2, 1, 3)) for _ in range(2)]
    host = [(torch.zeros(2, 2, 1, 3), torch.zeros(2, 2, 1, 3)) for _ in range(2)]

    reference.copy_blocks(device, host, [3, 1], [0, 1])

    for device_layer, host_layer in zip(device, host, strict=True):
        for source, destination in zip(device_layer, host_layer, strict=True):
            assert destination.equal(source[[3, 1]])


def test_rms_norm_rounds_before_the_weight() -> None:
    x, weight = torch.randn(3, 16, dtype=torch.bfloat16) * 50, torch.randn(16, dtype=torch.bfloat16)
    wide = x.double()
    normalised = wide / (wide.square().mean(-1, keepdim=True) + 0.5).sqrt()
    expected = (normalised.to(torch.bfloat16).double() * weight.double()).to(torch.bfloat16)
    assert reference.rms_norm(x, weight, 0.5).equal(expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_add_rms_norm_is_the_norm_of_the_rounded_sum(dtype: torch.dtype) -> None:
    x, residual, weight = (torch.randn(*shape, dtype=dtype) for shape in ((3, 16), (3, 16), (16,)))
    summed = x + residual
    normed, new_residual = reference.add_rms_norm(x, residual, weight, 1e-5)
    assert new_residual.equal(summed)
    assert normed.equal(reference.rms_norm(summed, weight, 1e-5))


def test_rotary_embedding_rotates_pairs_half_a_head_apart() -> None:
    angles = torch.rand(5, HEAD_DIM // 2, dtype=torch.float64) * 6
    query, key = (
        torch.randn(5, 4, HEAD_DIM, dtype=torch.float64),
        torch.randn(5, 2, HEAD_DIM, dtype=torch.float64),
    )
    turns = torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
    for rotated, x in zip(
        reference.rotary_embedding(query, key, angles.cos(), angles.sin()), (query, key), strict=True
    ):
        expected = torch.complex(x[..., : HEAD_DIM // 2], x[..., HEAD_DIM // 2 :]) * turns
        torch.testing.assert_close(rotated, torch.cat((expected.real, expected.imag), dim=-1))


def test_silu_and_mul_takes_the_gate_first() -> None:
    gate, up = torch.randn(2, 3, 6, dtype=torch.float64)
    expected = gate / (1 + (-gate).exp()) * up
    torch.testing.assert_close(reference.silu_and_mul(torch.cat((gate, up), dim=-1)), expected)
