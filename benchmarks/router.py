"""What the router costs: the same streams through it, over gRPC and over HTTP, and past it.

One router, one scheduler and one shard serve everybody in turn. `scheduler` is a client that speaks the
router's own protocol: token ids in, token ids out. All clients share the machine with the servers, so they
read no more than they must. All is measured twice: with the model on these cores, and with a shard that
leaves them alone, as one on a GPU does. Throughput is that of the 64 requests of `benchmarks.throughput`, all
streamed. Time to first token is that of short requests, one at a time, while 63 others stream.
"""

import asyncio
import random
import sys
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, Final

from benchmarks import models
from benchmarks.child_process import ChildProcess
from benchmarks.command import Parser, execute, positive_int, rounds_of, settle_s
from benchmarks.contest import settle
from benchmarks.lean_clients import Client, Connect, DirectClient, GrpcClient, HttpClient
from benchmarks.results import Results, comparison
from benchmarks.workload import Work, WorkRequest, make, offline, output_tokens
from launcher.children import child_specs, metrics_addresses
from launcher.config import ServeConfig
from launcher.preflight import claim_addresses
from launcher.readiness import wait_until_ready
from launcher.socket_folder import socket_folder

DIRECT: Final = "scheduler"
_POLL_S: Final = 0.5
# The longest pause before a probe: a few steps.
_PAUSE_S: Final = 0.2
PROBE: Final = WorkRequest(tuple(range(300, 332)), 2)


class Stack:
    """The three processes. Runs until closed.

    With `resting_shard`, flags of `benchmarks.resting_shard`, that is the shard.
    """

    def __init__(self, model: Path, sockets: Path, config: ServeConfig, resting_shard: Sequence[str]) -> None:
        options = ("listen-address", "http-address", *metrics_addresses(config))
        addresses = claim_addresses(dict.fromkeys(options, "127.0.0.1:0"))
        specs = child_specs(config, addresses, model, model, "model", sockets, None)
        if resting_shard:
            shard = (
                "--listen-address",
                f"unix:{sockets}/shard-0",
                "--metrics-address",
                specs[-1].metrics_address,
            )
            command = (sys.executable, "-m", "benchmarks.resting_shard", *shard, *resting_shard)
            specs[-1] = replace(specs[-1], argv=command)
        self._children = [ChildProcess(f"router-{one.name}", one.argv, one.environ) for one in specs]
        self._metrics = {one.name: one.metrics_address for one in specs}
        self.connects: dict[str, Connect] = {
            DIRECT: lambda: DirectClient.connect(f"unix:{sockets}/scheduler"),
            "gRPC": lambda: GrpcClient.connect(addresses["listen-address"]),
            "HTTP": lambda: HttpClient.connect(addresses["http-address"]),
        }

    async def wait_ready(self) -> None:
        """Until requests are served."""
        await wait_until_ready(self._metrics, lambda *_: None)

    async def unless_ended(self, work: Coroutine[Any, Any, None]) -> None:
        """Awaits `work`. Raises `BenchmarkError` once a process ends, as nobody starts it again."""
        working = asyncio.create_task(work)
        try:
            while not working.done():
                await asyncio.wait({working}, timeout=_POLL_S)
                for child in self._children:
                    if child.process.poll() is not None:
                        raise child.failure()
            working.result()
        finally:
            working.cancel()

    def close(self) -> None:
        """Ends them, the router first."""
        for child in self._children:
            child.close()


async def rate(client: Client, work: Work) -> float:
    """Output tokens per second."""
    began = time.perf_counter()
    await asyncio.gather(*(_drain(client.stream(request)) for request in work))
    return output_tokens(work) / (time.perf_counter() - began)


async def first_tokens(client: Client, background: Work, probes: int) -> list[float]:
    """Seconds to the first token of each of `probes` requests, while `background` streams."""
    others = [asyncio.create_task(_drain(client.stream(request))) for request in background]
    taken: list[float] = []
    try:
        # The background's prompts are done once one of them after the other gave a token.
        async for _ in client.stream(PROBE):
            pass
        for _ in range(probes):
            # An answer ends with a step; the next request is to come at any time of one.
            await asyncio.sleep(random.uniform(0, _PAUSE_S))  # noqa: S311
            began, first = time.perf_counter(), 0.0
            async for _ in client.stream(PROBE):
                first = first or time.perf_counter() - began
            taken.append(first)
        if any(other.done() for other in others):
            raise RuntimeError("the background ended before the last probe")
    finally:
        for other in others:
            other.cancel()
        await asyncio.gather(*others, return_exceptions=True)
    return taken


async def _drain(tokens: AsyncIterator[None]) -> None:
    async for _ in tokens:
        pass


def parse() -> Parser:
    """Flags."""
    parser = Parser("router", __doc__)
    models.add_flags(parser)
    parser.add_size("--streams", 64, 4, "requests at once", type=positive_int)
    parser.add_size(
        "--background-tokens",
        2000,
        2000,
        "of each stream beside the probes, more than it writes meanwhile",
        type=positive_int,
    )
    parser.add_size("--step-ms", 25, 5, "of a step where the model is elsewhere", type=positive_int)
    parser.add_size("--probes", 40, 2, "requests whose first token is timed", type=positive_int)
    return parser


async def measure(options: Namespace, results: Results, stack: Stack, vocab_size: int, where: str) -> None:
    """Each client in turn, round by round. `where` the model is belongs to the names of what is measured."""
    await stack.wait_ready()
    count = options.streams
    work = offline(vocab_size, count)
    background = make([(16, options.background_tokens)] * (count - 1), vocab_size)
    rates: dict[str, list[float]] = {name: [] for name in stack.connects}
    firsts: dict[str, list[float]] = {name: [] for name in stack.connects}
    for _ in range(rounds_of(options)):
        for name, connect in stack.connects.items():
            settle(settle_s(options))
            async with connect() as client:
                rates[name].append(await rate(client, work))
                firsts[name].append(median(await first_tokens(client, background, options.probes)))
    for name in stack.connects:
        if name != DIRECT:
            title = f"{count} streams, {name}{where}"
            results.line(comparison(title, "output tok/s", rates[name], rates[DIRECT], DIRECT))
            line = comparison(
                f"time to first token beside {count - 1} streams, {name}{where}",
                "s",
                firsts[name],
                firsts[DIRECT],
                DIRECT,
                lower_is_better=True,
            )
            added = median(mine - other for mine, other in zip(firsts[name], firsts[DIRECT], strict=True))
            results.line({**line, "added_ms": round(1e3 * added, 2)})


def body(options: Namespace, results: Results) -> None:
    """Starts everything, measures, ends everything."""
    model = models.find(options)
    config = ServeConfig(dtype=options.dtype, device=options.device)
    resting_shard = ("--step-ms", str(options.step_ms), "--vocab-size", str(model.vocab_size))
    for where, flags in (("", ()), (", model elsewhere", resting_shard)):
        with socket_folder() as sockets:
            stack = Stack(model.folder, sockets, config, flags)
            try:
                measuring = measure(options, results, stack, model.vocab_size, where)
                asyncio.run(stack.unless_ended(measuring))
            finally:
                stack.close()


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs `python -m benchmarks.router`."""
    execute(parse(), arguments, body)


if __name__ == "__main__":
    main()
