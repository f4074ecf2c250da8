"""Writing and moving K and V in Triton: the same bits as `reference`."""

import math
from types import ModuleType

import pytest
import torch
from torch import Tensor

import kernels.triton as triton_kernels
from kernels import reference
from kernels.triton import cache
from kernels.triton.cache import gather_blocks, scatter_blocks
from tests.kernels.cases import DEVICE, FP8

Caches = list[tuple[Tensor, Tensor]]


def written(
    implementation: ModuleType,
    key: Tensor,
    value: Tensor,
    cache_dtype: torch.dtype,
    slots: Tensor,
    scale: float,
) -> Tensor:
    """Both caches as bytes, after a write to slots that held zeros."""
    caches = [torch.zeros(5, 16, *key.shape[1:], dtype=cache_dtype, device=DEVICE) for _ in "kv"]
    implementation.write_kv(key, value, *caches, slots, scale, scale)
    return torch.stack([written_to.view(torch.uint8) for written_to in caches])


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("cache_dtype", [None, FP8], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 64), (3, 80), (20, 128), (2, 256)])
def test_write_kv_as_the_reference(
    heads: int, head_dim: int, dtype: torch.dtype, cache_dtype: torch.dtype | None, strided: bool
) -> None:
    if strided:
        side_by_side = torch.randn(7, 4 * heads, head_dim, dtype=dtype, device=DEVICE)
        key, value = side_by_side[:, 2 * heads : 3 * heads], side_by_side[:, 3 * heads :]
    else:
        key, value = torch.randn(2, 7, heads, head_dim, dtype=dtype, device=DEVICE)
    slots = torch.tensor([79, 0, 15, -1, 16, 33, -7], device=DEVICE)
    scale = 0.03 if cache_dtype else 1.0
    expected = written(reference, key, value, cache_dtype or dtype, slots, scale)
    assert written(triton_kernels, key, value, cache_dtype or dtype, slots, scale).equal(expected)


def test_write_kv_drops_a_token_past_the_cache() -> None:
    key = torch.ones(2, 1, 64, device=DEVICE)
    stored = written(triton_kernels, key, key, torch.float32, torch.tensor([80, 2**40], device=DEVICE), 1.0)
    assert stored.count_nonzero() == 0


def test_write_kv_of_no_tokens_writes_nothing() -> None:
    nothing = torch.ones(0, 1, 64, device=DEVICE)
    slots = torch.empty(0, dtype=torch.int64, device=DEVICE)
    assert written(triton_kernels, nothing, nothing, torch.float32, slots, 1.0).count_nonzero() == 0


def test_write_kv_rounds_to_every_fp8_number_as_torch_does() -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    ordered = numbers[numbers.isfinite()].sort().values
    between = (ordered[1:] + ordered[:-1]) / 2
    beyond = torch.tensor([449, 464, 1e9, math.inf, -math.inf, 1e-30, 2**-10, -(2**-10), -0.0, math.nan])
    nudged = [between.nextafter(torch.full_like(between, side)) for side in (-math.inf, math.inf)]
    key = torch.cat((ordered, between, *nudged, beyond))
    key = torch.nn.functional.pad(key, (0, -len(key) % 64)).view(-1, 1, 64).to(DEVICE)
    slots = torch.arange(len(key), device=DEVICE)
    expected = written(reference, key, key, FP8, slots, 1.0)
    result = written(triton_kernels, key, key, FP8, slots, 1.0)
    # NaN has a sign in neither.
    nan = (expected & 0x7F) == 0x7F
    assert nan.sum() == 2
    assert torch.where(nan, result & 0x7F, result).equal(torch.where(nan, expected & 0x7F, expected))


def pool(layers: int, blocks: int, shape: tuple[int, ...], dtype: torch.dtype) -> Caches:
    return [
        (
            torch.randn(blocks, *shape, device=DEVICE).to(dtype),
            torch.randn(blocks, *shape, device=DEVICE).to(dtype),
        )
        for _ in range(layers)
    ]


def copied(caches: Caches) -> Caches:
    return [(key.clone(), value.clone()) for key, value in caches]


def assert_same(one: Caches, other: Caches) -> None:
    for layer, other_layer in zip(one, other, strict=True):
        for tensor, expected in zip(layer, other_layer, strict=True):
            assert tensor.view(torch.uint8).equal(expected.view(torch.uint8))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((16, 2, 64), torch.bfloat16),
        ((8, 1, 80), FP8),
        ((16, 3, 128), torch.float32),
        ((1, 1, 3), torch.float16),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("sources", "destinations"),
    [([5], [0]), ([1, 1, 4], [2, 0, 3]), ([0, 1, 0], [1, 2, 3])],
    ids=["one block", "several", "chained"],
)
def test_copy_blocks_within_a_tier(
    sources: list[int], destinations: list[int], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    caches = pool(2, 6, shape, dtype)
    expected = copied(caches)
    # As bytes, which torch can index whatever their dtype.
    by_bytes = [(k.view(torch.uint8), v.view(torch.uint8)) for k, v in expected]
    reference.copy_blocks(by_bytes, by_bytes, sources, destinations)
    triton_kernels.copy_blocks(caches, caches, sources, destinations)
    assert_same(caches, expected)


@pytest.mark.parametrize("tier", ["cpu", DEVICE])
def test_copy_blocks_to_another_pool_and_back(tier: str) -> None:
    device = pool(2, 6, (16, 2, 64), torch.bfloat16)
    host = [(k.to(tier), v.to(tier)) for k, v in pool(2, 3, (16, 2, 64), torch.bfloat16)]
    before = copied(device)
    triton_kernels.copy_blocks(device, host, [5, 0], [0, 2])
    triton_kernels.copy_blocks(host, device, [0, 2], [1, 3])
    reference.copy_blocks(before, before, [5, 0], [1, 3])
    assert_same(device, before)


@pytest.mark.parametrize("launchable", [False, True])
def test_gathered_blocks_scatter_to_where_they_are_sent(
    launchable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not launchable:
        if DEVICE != "cpu":
            pytest.skip("on the host, without kernels, is for the CPU")
        monkeypatch.setattr(cache, "_launchable", lambda _: False)
    caches = [tensor for layer in pool(2, 6, (8, 1, 64), torch.float32) for tensor in layer]
    before = [tensor.clone() for tensor in caches]
    staging = gather_blocks(caches, [4, 1])
    assert staging.shape == (4, 2, 8, 1, 64)
    scatter_blocks(staging, caches, [0, 4])
    for tensor, old in zip(caches, before, strict=True):
        assert tensor.equal(old[[4, 1, 2, 3, 1, 5]])


def test_copy_blocks_refuses_a_block_outside_the_cache() -> None:
    caches = pool(1, 6, (8, 1, 64), torch.float32)
    with pytest.raises(IndexError, match="blocks 3 to 6 don't all lie in a cache of 6"):
        triton_kernels.copy_blocks(caches, caches, [0, 1], [3, 6])


def test_copy_blocks_refuses_unlike_caches() -> None:
    caches = pool(1, 6, (8, 1, 64), torch.float32)
    with pytest.raises(ValueError, match="not like the first"):
        triton_kernels.copy_blocks(caches, pool(1, 6, (8, 2, 64), torch.float32), [0], [3])
