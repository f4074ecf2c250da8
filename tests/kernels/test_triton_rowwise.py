"""Norms, rotary embedding and activation in Triton against float64, and beside `reference`."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import kernels.triton as triton_kernels
from kernels import reference
from tests.kernels.cases import DEVICE

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def normal(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(0)).to(dtype)


def assert_as_good(result: Tensor, by_reference: Tensor, expected: Tensor) -> None:
    """At most twice the error of `reference`, and one rounding."""
    assert (result.dtype, result.shape) == (by_reference.dtype, by_reference.shape)
    error, allowed = ((x.double() - expected).abs().max().item() for x in (result, by_reference))
    assert error <= 2 * allowed + torch.finfo(result.dtype).eps * expected.abs().max().item()


def exact_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda x: x,
    "every other row": lambda x: x[::2],
    "heads of a slice": lambda x: x.view(4, 3, -1)[:, 1:],
    "four dimensions": lambda x: x.view(2, 2, 3, -1),
    "four dimensions, sliced": lambda x: x.view(2, 2, 3, -1)[:, :1],
    "one row": lambda x: x[3],
    "transposed": lambda x: x.T.contiguous().T,
    "no rows": lambda x: x[:0],
}


@DTYPES
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [1, 64, 80, 576, 4097])
def test_rms_norm(size: int, layout: str, dtype: torch.dtype) -> None:
    x, weight = LAYOUTS[layout](normal(12, size, dtype=dtype) * 20), normal(size, dtype=dtype)
    result, by_reference = (f.rms_norm(x, weight, 1e-5) for f in (triton_kernels, reference))
    if x.numel():
        assert_as_good(result, by_reference, exact_norm(x, weight, 1e-5))
    assert result.shape == x.shape


@DTYPES
@pytest.mark.parametrize("layout", LAYOUTS)
def test_add_rms_norm(layout: str, dtype: torch.dtype) -> None:
    x, residual = (
        LAYOUTS[layout](normal(12, 576, dtype=dtype)),
        LAYOUTS[layout](normal(12, 576, dtype=dtype) * 9),
    )
    weight = normal(576, dtype=dtype)
    expected_sum = x + residual
    by_reference = reference.rms_norm(expected_sum, weight, 1e-5)
    normed, new_residual = triton_kernels.add_rms_norm(x, residual, weight, 1e-5)
    assert new_residual.equal(expected_sum)
    if x.numel():
        assert_as_good(normed, by_reference, exact_norm(expected_sum, weight, 1e-5))


def test_add_rms_norm_writes_the_sum_into_the_residual() -> None:
    x, residual = normal(3, 64, dtype=torch.float32), torch.ones(3, 64, device=DEVICE)
    _, new_residual = triton_kernels.add_rms_norm(x, residual, torch.ones(64, device=DEVICE), 1e-5)
    assert new_residual is residual
    assert residual.equal(x + 1)


def test_rows_that_are_too_long_are_refused() -> None:
    x = torch.zeros(1, 65537, device=DEVICE)
    with pytest.raises(ValueError, match="rows of 65537 elements: at most 65536"):
        triton_kernels.rms_norm(x, x[0], 1e-5)


@DTYPES
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "num_kv_heads", "head_dim"),
    [(5, 9, 3, 64), (1, 1, 1, 80), (3, 40, 8, 128), (2, 7, 1, 256), (0, 2, 1, 64)],
)
def test_rotary_embedding(
    num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, strided: bool, dtype: torch.dtype
) -> None:
    both = normal(num_tokens, num_heads + num_kv_heads, head_dim, dtype=dtype)
    query, key = both.split_with_sizes([num_heads, num_kv_heads], dim=1)
    if not strided:
        query, key = query.contiguous(), key.contiguous()
    angles = torch.rand(num_tokens, head_dim // 2, device=DEVICE) * 6
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    results, by_reference, expected = (
        f(*tensors)
        for f, tensors in (
            (triton_kernels.rotary_embedding, (query, key, cos, sin)),
            (reference.rotary_embedding, (query, key, cos, sin)),
            (reference.rotary_embedding, (query.double(), key.double(), cos.double(), sin.double())),
        )
    )
    for result, other, exact in zip(results, by_reference, expected, strict=True):
        assert result.is_contiguous()
        assert result.shape == other.shape
        if num_tokens:
            assert_as_good(result, other, exact)


@DTYPES
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 1), (3, 1536), (5, 1025), (0, 64)])
def test_silu_and_mul(num_tokens: int, size: int, strided: bool, dtype: torch.dtype) -> None:
    gate_up = normal(num_tokens, 2 * size + 8 * strided, dtype=dtype)[:, : 2 * size] * 4
    gate, up = gate_up.double().chunk(2, dim=-1)
    expected = gate * torch.sigmoid(gate) * up
    result = triton_kernels.silu_and_mul(gate_up)
    assert result.shape == expected.shape
    if num_tokens:
        assert_as_good(result, reference.silu_and_mul(gate_up), expected)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_silu_and_mul_of_extremes() -> None:
    gate = torch.tensor([[-1e4, 1e4, 0.0, torch.inf]], device=DEVICE)
    result = triton_kernels.silu_and_mul(torch.cat((gate, torch.ones_like(gate)), dim=-1))
    assert result.tolist() == [[0, 1e4, 0, torch.inf]]
