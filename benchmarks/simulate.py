"""Serves a trace in virtual time: the real scheduler, on a cost model, against servers without paging.

First, on few requests, the rate that each server sustains, and how many times that ours is (without prefix
caching; `paged-caching` is with). Then a run of many requests at a given rate, by default at 90 % of that.
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.command import BareParser, count, failing_in_one_line, positive_float, positive_int
from benchmarks.cost_model import CostModel
from benchmarks.plot import plot_latency, pyplot
from benchmarks.sustainable import BASELINES, CACHING, PAGED, Machine, Point, Search
from benchmarks.traces import TRACES
from scheduler.limits import Limits

VOCAB_SIZE = 1 << 31
DEFAULT_TRACE = "sharegpt-like"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Flags; the defaults are OPT-13B on an A100 of 40 GB, as the paper has it."""
    parser = BareParser("simulate", __doc__)
    cost = CostModel()
    add = parser.add_argument
    add("trace", choices=TRACES, default=DEFAULT_TRACE, nargs="?", help="what is asked")
    add("--requests", type=count, default=100_000, help="requests of the long run; 0: none")
    add("--rate", type=positive_float, help="requests per second of the long run")
    add("--sweep-requests", type=positive_int, default=2_000, help="requests of each run of the comparison")
    add(
        "--latency-bound",
        type=positive_float,
        default=0.1,
        help="mean normalised latency, s per output token",
    )
    add("--seed", type=int, default=0, help="of the trace")
    add(
        "--num-blocks",
        type=positive_int,
        default=981,
        help="device blocks; 981 of 16 tokens at 800 KB are 12 GB",
    )
    add("--num-host-blocks", type=count, default=0, help="host blocks, for swapping")
    add("--block-size", type=positive_int, default=16, help="tokens")
    add("--max-num-seqs", type=positive_int, default=256, help="sequences")
    add("--max-num-batched-tokens", type=positive_int, default=4096, help="tokens of one step")
    add(
        "--max-model-len",
        type=positive_int,
        default=2048,
        help="tokens, and what a reservation of the most takes",
    )
    add("--preemption-mode", choices=("auto", "recompute", "swap"), default="auto", help="how")
    add("--prefix-caching", action=argparse.BooleanOptionalAction, default=True, help="in the long run")
    add("--fixed-s", type=positive_float, default=cost.fixed_s, help="seconds per step")
    add("--per-token-s", type=positive_float, default=cost.per_token_s, help="seconds per token computed")
    add(
        "--per-kv-token-s",
        type=positive_float,
        default=cost.per_kv_token_s,
        help="seconds per token of K and V read",
    )
    add(
        "--per-swapped-token-s",
        type=positive_float,
        default=cost.per_swapped_token_s,
        help="seconds per token swapped",
    )
    add(
        "--results",
        type=Path,
        help="folder for simulate*.jsonl and .png; by default neither is written",
    )
    return parser.parse_args(arguments)


def machine_of(options: argparse.Namespace) -> Machine:
    """Memory, limits and cost model that the flags give."""
    limits = Limits(
        options.num_blocks,
        options.block_size,
        options.max_num_seqs,
        options.max_num_batched_tokens,
        options.max_model_len,
        VOCAB_SIZE,
        options.num_host_blocks,
        options.preemption_mode,
    )
    cost = CostModel(
        options.fixed_s, options.per_token_s, options.per_kv_token_s, options.per_swapped_token_s
    )
    return Machine(limits, cost)


def run_long(options: argparse.Namespace, machine: Machine, rate: float) -> dict[str, Any]:
    """All requests at one rate, on our server."""
    trace = TRACES[options.trace](options.requests, rate, options.seed)
    server = machine.paged(options.prefix_caching)
    started = time.perf_counter()
    measured = server.run(trace)
    totals = server.totals
    return {
        "server": CACHING if options.prefix_caching else "paged",
        "trace": options.trace,
        "rate": round(rate, 3),
        **measured.summary(),
        "prefix_hit_ratio": round(totals.hit_tokens / max(totals.queried_tokens, 1), 4),
        "recomputes": totals.recomputes,
        "swaps": totals.swaps,
        "steps": measured.steps,
        "wall_s": round(time.perf_counter() - started, 1),
    }


class Output:
    """JSON lines, printed and, with a path, kept."""

    def __init__(self, path: Path | None) -> None:
        self._file = path.open("w") if path else None

    def line(self, fields: dict[str, Any], printed: bool = True) -> None:
        """One JSON object."""
        text = json.dumps(fields)
        if printed:
            print(text, flush=True)
        if self._file:
            print(text, file=self._file, flush=True)


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """When, where and with which flags."""
    hardware = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    flags = {name: value for name, value in vars(options).items() if name != "results"}
    return {"date": datetime.now(UTC).date().isoformat(), "hardware": hardware, **flags}


def compare(search: Search, machine: Machine, output: Output) -> dict[str, Point]:
    """The sustainable rate of every server."""
    sustained: dict[str, Point] = {}
    for name in (*PAGED, *BASELINES):
        sustained[name] = search.find(partial(machine.server, name))
        output.line(
            {
                "server": name,
                "sustainable_rate": round(sustained[name].rate, 3),
                "normalised_latency_s": round(sustained[name].normalised_latency_s, 4),
                "paged_ratio": round(sustained["paged"].rate / sustained[name].rate, 2),
                "latency_bound_s": search.bound_s,
            }
        )
    return sustained


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the lines, and keeps them with `--results`."""
    options = parse(arguments)
    with failing_in_one_line("python -m benchmarks.simulate"):
        run(options)


def run(options: argparse.Namespace) -> None:
    """The comparison, the long run, and with `--results` the curves."""
    stem = "simulate" if options.trace == DEFAULT_TRACE else f"simulate-{options.trace}"
    path = options.results / stem if options.results else None
    if path:
        pyplot()  # missing, it should be missed now
    output = Output(path.with_suffix(".jsonl") if path else None)
    output.line(settings(options), printed=False)
    machine, make = machine_of(options), TRACES[options.trace]
    search = Search(lambda rate: make(options.sweep_requests, rate, options.seed), options.latency_bound)
    sustained = compare(search, machine, output)
    if options.requests:
        server = CACHING if options.prefix_caching else "paged"
        output.line(run_long(options, machine, options.rate or 0.9 * sustained[server].rate))
    if path:
        curves = {name: search.curve(partial(machine.server, name), p.rate) for name, p in sustained.items()}
        for name, points in curves.items():
            for rate, latency in points:
                fields = {"server": name, "rate": round(rate, 3), "normalised_latency_s": round(latency, 4)}
                output.line(fields, printed=False)
        title = f"{options.trace}, {options.num_blocks * options.block_size:,} token slots"
        plot_latency(curves, search.bound_s, title, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
