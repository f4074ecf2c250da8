"""Each operation of `kernels` on the shapes that steps have: checked against `reference`, then timed.

The limit of a case is the longer of a measured copy that moves as many bytes as the operation must, and its
floating-point operations at the measured rate of a large matrix product. The peer is plain PyTorch.
"""

import copy
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks import models
from benchmarks.command import BenchmarkError, Parser, execute, settle_s
from benchmarks.contest import settle
from benchmarks.device import copy_seconds, device_of, gemm_peak, seconds
from benchmarks.kernel_cases import CASES, GPU_CASES, Prepared, Shape
from benchmarks.results import Results, comparison
from kernels import AttentionBatch
from shard.model_config import load_model_config

# Of a result of about 1, by dtype: rounding of the inputs' own kind, with room for the order of sums.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 4e-2}
REFERENCE = "reference"


def parse() -> Parser:
    """Flags."""
    parser = Parser("kernels", __doc__)
    models.add_flags(parser)
    parser.add_argument("--only", default="", metavar="WORD", help="cases whose name has it")
    return parser


def results_of(function: Callable[..., Any], prepared: Prepared, widen: bool = False) -> list[Tensor]:
    """What a call on copies of the arguments gives; with `widen`, from their values in float32."""
    arguments = [_copied(argument, widen) for argument in prepared.arguments]
    returned = function(*arguments)
    return _tensors([arguments[index] for index in prepared.written] if prepared.written else returned)


def _copied(argument: Any, widen: bool) -> Any:
    if isinstance(argument, AttentionBatch):
        return argument
    if isinstance(argument, Tensor):
        argument = argument.clone()
        return argument.float() if widen and argument.is_floating_point() else argument
    if isinstance(argument, tuple | list):
        return type(argument)(_copied(one, widen) for one in argument)
    return copy.copy(argument)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value.float()]
    return [tensor for one in value for tensor in _tensors(one)]


def error_of(prepared: Prepared) -> float:
    """The largest difference from the reference in float32, where results are about 1 in size."""
    expected = results_of(prepared.oracle, prepared, widen=True)
    found = results_of(prepared.ours, prepared)
    return max(
        ((one - other).abs() / other.abs().clamp(min=1)).max().item()
        for one, other in zip(found, expected, strict=True)
    )


@torch.inference_mode()
def body(options: Namespace, results: Results) -> None:
    """Prints one line per case. A wrong result ends the benchmark."""
    device = device_of(options.device)
    config = load_model_config(models.find(options).folder)
    shape = Shape(
        config.hidden_size,
        config.intermediate_size,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.vocab_size,
        getattr(torch, options.dtype),
        device,
        scale=0.05 if options.quick else 1.0,
    )
    torch.manual_seed(0)
    budget_s = 0.005 if options.quick else 0.5
    cases = [*CASES, *(GPU_CASES if device.type == "cuda" else ())]
    chosen = [case for case in cases if options.only in case.name]
    if not chosen:
        raise BenchmarkError(f"--only {options.only}: no case has that in its name")
    for case in chosen:
        settle(settle_s(options))
        prepared = case.prepare(shape)
        error = error_of(prepared)
        # Roundings go either way.
        if not error <= TOLERANCES[shape.dtype] * prepared.num_roundings**0.5:
            raise BenchmarkError(f"{case.name} is off by {error:.3g} from the reference")
        line = measure(case.name, prepared, shape, budget_s, options.rounds or 3)
        results.line(
            {**line, "max_error": float(f"{error:.3g}"), "dtype": options.dtype, "device": device.type}
        )


def measure(name: str, prepared: Prepared, shape: Shape, budget_s: float, rounds: int) -> dict[str, Any]:
    """Ours, the reference and a copy in turn, in microseconds."""
    mine: list[float] = []
    others: list[float] = []
    copies: list[float] = []
    for _ in range(rounds):
        copies.append(copy_seconds(prepared.num_bytes, shape.device, budget_s))
        for function, taken in ((prepared.ours, mine), (prepared.peer, others)):
            taken.append(1e6 * _timed(function, prepared, shape.device, budget_s))
    copying = min(copies)
    computing = 0.0
    if prepared.num_flops:
        computing = prepared.num_flops / gemm_peak(shape.dtype, shape.device, budget_s)
    line = comparison(
        name, "µs", mine, others, REFERENCE, 1e6 * max(copying, computing), lower_is_better=True
    )
    fastest = min(mine) / 1e6
    return {
        **line,
        "bound": "copy" if copying >= computing else "gemm",
        "gb_per_s": round(prepared.num_bytes / fastest / 1e9, 2),
        "copy_gb_per_s": round(prepared.num_bytes / copying / 1e9, 2),
        "gflop_per_s": round(prepared.num_flops / fastest / 1e9, 1),
    }


def _timed(function: Callable[..., Any], prepared: Prepared, device: torch.device, budget_s: float) -> float:
    return seconds(lambda: function(*prepared.arguments), device, budget_s)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs `python -m benchmarks.kernels`."""
    execute(parse(), arguments, body)


if __name__ == "__main__":
    main()
