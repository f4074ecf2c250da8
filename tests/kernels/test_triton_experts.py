"""The grouped multiplication of experts in Triton against float64, and beside `reference`."""

import pytest
import torch
from torch import Tensor

import kernels.triton as triton_kernels
from kernels import reference
from tests.kernels.cases import DEVICE

HIDDEN, NUM_EXPERTS, PLACES = 48, 5, 2


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("held", [range(5), range(1, 3), range(4, 5)], ids=str)
@pytest.mark.parametrize(("num_tokens", "size"), [(0, 64), (1, 64), (3, 33), (70, 33)])
def test_mix_experts(num_tokens: int, held: range, size: int, dtype: torch.dtype) -> None:
    x = normal(num_tokens, HIDDEN).to(dtype)
    gate_up = normal(len(held), 2 * size, HIDDEN, seed=1).to(dtype) / 7
    down = normal(len(held), HIDDEN, size, seed=2).to(dtype) / 7
    shares, experts = reference.route(x, normal(NUM_EXPERTS, HIDDEN, seed=3), PLACES, True)

    result, by_reference = (
        f.mix_experts(x, shares, experts, gate_up, down, held.start) for f in (triton_kernels, reference)
    )

    exact = reference.mix_experts(
        x.double(), shares.double(), experts, gate_up.double(), down.double(), held.start
    )
    assert (result.dtype, result.shape) == (dtype, x.shape)
    if num_tokens:
        error, allowed = ((one.double() - exact).abs().max().item() for one in (result, by_reference))
        assert error <= 2 * allowed + torch.finfo(dtype).eps * exact.abs().max().item()


def test_experts_that_nobody_takes_add_nothing() -> None:
    x, experts = normal(6, HIDDEN), torch.full((6, PLACES), 4, device=DEVICE)
    gate_up, down = normal(3, 64, HIDDEN), normal(3, HIDDEN, 32)
    assert not triton_kernels.mix_experts(x, normal(6, PLACES), experts, gate_up, down, 0).any()
