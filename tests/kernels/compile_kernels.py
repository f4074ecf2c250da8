"""Compiles every Triton kernel for Ampere, Hopper and a smaller GPU, as launched, without any of them.

`python -m tests.kernels.compile_kernels [--all]` prints one JSON object per kernel. A process of its own,
because a test's process may have imported Triton under its interpreter.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any, Final

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction

import kernels.triton as operations
from kernels.triton import tuning
from tests.kernels.cases import FP8, attention_case

CAPABILITIES: Final = {"sm80": (8, 0), "sm90": (9, 0), "other": (8, 6)}
BF16: Final = torch.bfloat16


class Driver:
    """Stands in for the driver of a GPU that isn't here: enough to compile for it."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self.arch = capability[0] * 10 + capability[1]
        self.target = GPUTarget("cuda", self.arch, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.arch

    def get_current_stream(self, _device: int) -> int:
        return 0


def main(everything: bool) -> None:
    """Prints what each kernel takes of a multiprocessor, for each family."""
    run = JITFunction.run
    compiled: list[tuple[str, Any]] = []

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        compiled.append((self.fn.__name__, run(self, *args, grid=grid, warmup=True, **options)))

    JITFunction.run = compile_only
    patched: Any = tuning
    for family, capability in CAPABILITIES.items():
        triton.runtime.driver.set_active(Driver(capability))
        patched.current_capability = lambda capability=capability: capability
        for name in launch(everything):
            for kernel, binary in compiled:
                registers, spilled = resources(binary)
                report = {
                    "family": family,
                    "launch": name,
                    "kernel": kernel,
                    "hash": binary.hash,
                    "registers": registers,
                    "spilled": spilled,
                    "shared": binary.metadata.shared,
                }
                print(json.dumps(report), flush=True)
            compiled.clear()


def launch(everything: bool) -> Iterator[str]:
    """Launches operations; yields what each was."""
    rows = torch.zeros(4, 6, 128, dtype=BF16)
    gates, downs = torch.zeros(8, 64, 128, dtype=BF16), torch.zeros(8, 128, 32, dtype=BF16)
    for num_tokens in (4, 512):
        chosen = torch.zeros(num_tokens, 2, dtype=torch.int64)
        x, shares = torch.zeros(num_tokens, 128, dtype=BF16), torch.zeros(num_tokens, 2)
        operations.mix_experts(x, shares, chosen, gates, downs, 0)
        yield f"mix_experts of {num_tokens} tokens"
    query, key, value = rows.split_with_sizes([4, 1, 1], dim=1)
    for cache_dtype in (BF16, FP8):
        cache = torch.zeros(3, 16, 1, 128, dtype=cache_dtype)
        operations.write_kv(key, value, cache, cache, torch.arange(4))
        yield f"write_kv {cache_dtype}"
    operations.copy_blocks([(cache, cache)], [(cache, cache)], [0], [1])
    yield "copy_blocks"
    operations.rms_norm(rows[:, :4], rows[0, 0], 1e-5)
    operations.add_rms_norm(rows[0], rows[1], rows[0, 0], 1e-5)
    yield "norms"
    operations.rotary_embedding(query, key, rows[:, 0, :64], rows[:, 0, :64])
    yield "rotary_embedding"
    operations.silu_and_mul(rows.flatten(1))
    yield "silu_and_mul"

    for count in (1, 3, 16):
        many = torch.zeros(count, 4, 64, dtype=BF16)
        cache = torch.zeros(count, 16, 4, 64, dtype=BF16)
        operations.write_kv(many, many, cache, cache, torch.arange(count))
        operations.rms_norm(many.flatten(1), many[0].flatten(), 1e-5)
        operations.rotary_embedding(many, many, many[:, 0, :32], many[:, 0, :32])
        operations.silu_and_mul(many.flatten(1))
        for lens in ([(1, 9)] * (count - 1) + [(1, 300 * count)], [(2, 5 * count)] * count):
            attention_case(lens, num_kv_heads=1, group=1, head_dim=64, dtype=BF16).attend(operations)
        yield "steps"

    one, mixed = [(40, 300)], [(1, 300), (40, 300), (1, 700)]
    yield from attend(lens=one, head_dim=80, window=64, soft_cap=30.0)
    head_dims = tuning.HEAD_DIMS if everything else (128,)
    for head_dim in head_dims:
        yield from attend(lens=mixed, head_dim=head_dim)
        yield from attend(lens=mixed, head_dim=head_dim, fp8=True)
        if everything:
            yield from attend(lens=mixed, head_dim=head_dim, dtype=torch.float32)
            yield from attend(lens=mixed, head_dim=head_dim, dtype=torch.float16)


def attend(dtype: torch.dtype = BF16, **parameters: Any) -> Iterator[str]:
    attention_case(num_kv_heads=2, group=4, dtype=dtype, **parameters).attend(operations)
    yield f"paged_attention {dtype} {parameters}"


def resources(binary: Any) -> tuple[int, int]:
    """Registers of a thread, and bytes of them that spill to memory, as the assembler counts them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        listing = subprocess.run(command, capture_output=True, text=True, check=True)
    fields = dict(field.split(":") for field in listing.stdout.split() if field.count(":") == 1)
    return int(fields["REG"]), int(fields["STACK"])


if __name__ == "__main__":
    main("--all" in sys.argv[1:])
