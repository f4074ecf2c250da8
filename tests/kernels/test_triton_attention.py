"""The Triton attention kernels against float64, and beside `reference` in the same dtype."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels.triton as triton_kernels
from kernels import AttentionBatch, reference
from kernels.triton import decode
from tests.kernels.cases import DEVICE, AttentionCase, attention_case, pairwise

GRID = pairwise(
    {
        "lens": [
            [(1, 50), (7, 7), (1, 1), (16, 40), (1, 16)],
            [(1, 600), (1, 256), (1, 257)],
            [(33, 33), (1, 15), (2, 17), (1, 33)],
            [(70, 131)],
            [(1, 1)],
        ],
        "head_dim": [64, 80, 96, 112, 128, 256],
        "heads": [(2, 1), (1, 4), (1, 7), (3, 3), (1, 20)],
        "block_size": [16, 8, 24, 128],
        "window": [None, 1, 16, 100],
        "dtype": [torch.float32, torch.bfloat16, torch.float16],
        "soft_cap": [None, 3.0],
        "fp8": [False, True],
        "strided": [False, True],
    }
)


def name(combination: dict[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in combination.items())


def assert_as_good_as_reference(case: AttentionCase, result: Tensor) -> None:
    """At most twice the error of `reference`, and one rounding."""
    rounding = torch.finfo(case.query.dtype).eps * case.expected.abs().max().item()
    assert result.dtype == case.query.dtype
    assert case.error(result) <= 2 * case.error(case.attend(reference)) + rounding


@pytest.mark.parametrize("combination", GRID, ids=name)
def test_attention_is_as_good_as_the_reference(combination: dict[str, Any]) -> None:
    parameters = dict(combination)
    num_kv_heads, group = parameters.pop("heads")
    case = attention_case(num_kv_heads=num_kv_heads, group=group, device=DEVICE, **parameters)
    assert_as_good_as_reference(case, case.attend(triton_kernels))


@pytest.mark.parametrize("window", [None, 1, 15, 16, 17, 1000])
@pytest.mark.parametrize("total", [1, 15, 16, 17, 31, 32, 33, 65])
def test_attention_at_the_borders_of_blocks_and_tiles(total: int, window: int | None) -> None:
    lens = [(count, total) for count in sorted({1, 2, 16, total - 1, total} & set(range(1, total + 1)))]
    case = attention_case(lens, num_kv_heads=1, head_dim=64, window=window, device=DEVICE)
    assert_as_good_as_reference(case, case.attend(triton_kernels))


@pytest.mark.parametrize("garbage", [math.inf, -math.inf, 3e38])
def test_unused_slots_are_never_read(garbage: float) -> None:
    lens = [(1, 50), (7, 7), (1, 1), (16, 40)]
    case = attention_case(lens, head_dim=64, window=20, garbage=garbage, device=DEVICE)
    assert_as_good_as_reference(case, case.attend(triton_kernels))


@pytest.mark.parametrize("window", [None, 150])
def test_long_sequences_have_longer_splits(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "SPLIT_LENGTH", 32)
    monkeypatch.setattr(decode, "MAX_SPLITS", 4)
    lens = [(1, total) for total in (31, 32, 33, 64, 127, 128, 129, 200, 500)]
    case = attention_case(lens, num_kv_heads=1, group=3, head_dim=80, window=window, device=DEVICE)
    assert_as_good_as_reference(case, case.attend(triton_kernels))


def attend_alone(case: AttentionCase, index: int) -> Tensor:
    """The same sequence, in a batch of its own."""
    batch = case.batch
    start, end = batch.query_start[index].item(), batch.query_start[index + 1].item()
    alone = AttentionBatch.build(
        batch.block_tables[index : index + 1],
        batch.query_lens[index : index + 1],
        batch.host_seq_lens[index : index + 1],
        case.key_cache.shape[1],
    )
    return replace(case, query=case.query[start:end], batch=alone).attend(triton_kernels)


def test_a_row_does_not_depend_on_its_batch() -> None:
    case = attention_case([(1, 300), (5, 40), (1, 700), (1, 3)], num_kv_heads=1, head_dim=64, device=DEVICE)
    alone = [attend_alone(case, index) for index in range(4)]
    assert case.attend(triton_kernels).equal(torch.cat(alone))


def test_a_row_does_not_depend_on_the_cut_of_its_chunk() -> None:
    case = attention_case([(77, 77)], num_kv_heads=1, group=3, head_dim=64, window=40, device=DEVICE)
    whole = case.attend(triton_kernels)
    for cut in (19, 32, 50):
        chunk = AttentionBatch.build(case.batch.block_tables, [77 - cut], [77], 16)
        rest = replace(case, query=case.query[cut:], batch=chunk).attend(triton_kernels)
        # Not to the bit: numpy's products depend a little on where in a matrix a row is.
        torch.testing.assert_close(rest, whole[cut:], atol=1e-6, rtol=0)


def test_a_captured_grid_serves_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    case = attention_case([(1, 300), (1, 20), (1, 700)], num_kv_heads=1, head_dim=64, device=DEVICE)
    expected = case.attend(triton_kernels)
    launched = []

    def record(grid: tuple[int, ...]) -> Any:
        launched.append(grid)
        return kernel[grid]

    kernel = decode._decode
    monkeypatch.setattr(
        decode, "_decode", type("Recorder", (), {"__getitem__": lambda _, grid: record(grid)})()
    )
    monkeypatch.setattr(decode, "_capturing", lambda _: True)
    short = replace(case, batch=replace(case.batch, host_seq_lens=(1, 1, 1)))

    assert short.attend(triton_kernels).equal(expected)
    assert launched == [(3, 1, decode.MAX_SPLITS)]


def test_padding_yields_zeros_and_disturbs_nobody() -> None:
    case = attention_case([(1, 300), (1, 20), (1, 40)], num_kv_heads=1, head_dim=64, device=DEVICE)
    whole = case.attend(triton_kernels)
    lens = torch.tensor([300, 0, 40], dtype=torch.int32, device=DEVICE)
    tables = case.batch.block_tables.clone()
    tables[1] = 2**31 - 1
    padded = replace(case.batch, seq_lens=lens, host_seq_lens=(300, 0, 40), block_tables=tables)
    result = replace(case, batch=padded).attend(triton_kernels)

    assert result[[0, 2]].equal(whole[[0, 2]])
    assert result[1].count_nonzero() == 0
    torch.testing.assert_close(replace(case, batch=padded).attend(reference), result)


def test_sequences_without_a_token_are_passed_over() -> None:
    case = attention_case([(1, 30), (3, 20), (1, 40)], num_kv_heads=1, head_dim=64, device=DEVICE)
    batch = case.batch
    padded = replace(
        batch,
        block_tables=torch.cat((batch.block_tables, batch.block_tables[:1])),
        query_start=torch.tensor([0, 1, 4, 5, 5], dtype=torch.int32, device=DEVICE),
        seq_lens=torch.tensor([30, 20, 40, 30], dtype=torch.int32, device=DEVICE),
        query_lens=(1, 3, 1, 0),
        host_seq_lens=(30, 20, 40, 30),
    )
    assert replace(case, batch=padded).attend(triton_kernels).equal(case.attend(triton_kernels))


# The rows that fill up a tile are zeros, and 0 times -inf is NaN; they end up nowhere.
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("lens", [[(1, 300)], [(9, 40)]])
def test_scores_of_minus_infinity_weigh_nothing(lens: list[tuple[int, int]]) -> None:
    case = attention_case(lens, num_kv_heads=1, head_dim=64, window=7, garbage=1.0, device=DEVICE)
    case = replace(case, query=torch.ones_like(case.query))
    case.key_cache.fill_(-math.inf)
    assert case.attend(triton_kernels).count_nonzero() == 0

    # One key that counts: every token that sees it returns its value.
    last = lens[0][1] - 1
    block = int(case.batch.block_tables[0, last // 16])
    case.key_cache[block, last % 16] = 0.5
    torch.testing.assert_close(
        case.attend(triton_kernels)[-1], case.value_cache[block, last % 16].expand(2, 64)
    )


def test_limits_are_named() -> None:
    with pytest.raises(ValueError, match=r"block_size is 12: .* multiple of 8"):
        attention_case([(1, 3)], block_size=12, device=DEVICE).attend(triton_kernels)
    with pytest.raises(ValueError, match=r"head_dim is 264: .* 256"):
        attention_case([(1, 3)], head_dim=264, device=DEVICE).attend(triton_kernels)
    with pytest.raises(ValueError, match=r"scale 2\.0"):
        replace(attention_case([(1, 3)], device=DEVICE), key_scale=2.0).attend(triton_kernels)


def test_an_empty_batch_attends_to_nothing() -> None:
    case = attention_case([(1, 3)], head_dim=64, device=DEVICE)
    batch = AttentionBatch.build(case.batch.block_tables[:0], [], [], 16)
    assert replace(case, query=case.query[:0], batch=batch).attend(triton_kernels).shape == (0, 4, 64)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures a CUDA graph")
def test_a_graph_can_be_replayed_for_other_lengths() -> None:
    case = attention_case([(1, 300), (1, 20), (1, 700)], num_kv_heads=1, head_dim=64, device=DEVICE)
    expected = case.attend(triton_kernels)
    lens = case.batch.seq_lens.clone()
    case.batch.seq_lens.fill_(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = case.attend(triton_kernels)
    case.batch.seq_lens.copy_(lens)
    graph.replay()
    assert captured.equal(expected)
