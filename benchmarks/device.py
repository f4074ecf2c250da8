"""How long things take on a device, and what it can do at most: copying memory, and multiplying matrices."""

import time
from collections.abc import Callable
from functools import cache
from typing import Final

import torch

from benchmarks.command import BenchmarkError

# Of the square matrices whose product gives the peak.
GEMM_SIZE: Final = {"cpu": 2048, "cuda": 8192}


def device_of(name: str) -> torch.device:
    """The device.

    Raises:
        BenchmarkError: it isn't there.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise BenchmarkError("no NVIDIA GPU is to be had: this torch sees none")
    return torch.device(name)


def seconds(run: Callable[[], object], device: torch.device, budget_s: float) -> float:
    """Of one call: the fastest of batches of calls, over about `budget_s` seconds after a warm-up."""
    run()
    wait(device)
    calls, best, ends = 1, float("inf"), time.perf_counter() + budget_s
    while True:
        began = time.perf_counter()
        for _ in range(calls):
            run()
        wait(device)
        now = time.perf_counter()
        best = min(best, (now - began) / calls)
        if now > ends:
            return best
        # Long enough for the clock, and for a GPU's queue to fill.
        if now - began < min(0.01, budget_s / 4):
            calls *= 2


def wait(device: torch.device) -> None:
    """Until the device has done all."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def copy_seconds(num_bytes: int, device: torch.device, budget_s: float) -> float:
    """For a copy that moves `num_bytes`, half of them read and half of them written."""
    source = torch.ones(max(num_bytes // 2, 1), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return seconds(lambda: target.copy_(source), device, budget_s)


@cache
def gemm_peak(dtype: torch.dtype, device: torch.device, budget_s: float) -> float:
    """Floating-point operations per second of one large product."""
    size = GEMM_SIZE[device.type]
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / seconds(lambda: left @ right, device, budget_s)
