"""`python -m launcher ranks`: the shard processes of one machine, which one container runs."""

import asyncio
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from common import config as configuration
from common.config import option
from common.http import serve_http
from common.rpc import AddressError, split_host_port
from launcher.children import CLOSING_S, ChildSpec, shard_environ
from launcher.preflight import PreflightError
from launcher.readiness import get
from launcher.supervisor import StopSignals, Supervisor

PROBES: Final = ("/startupz", "/livez", "/readyz")


@dataclass(frozen=True)
class RanksConfig:
    """Starts and supervises the shard processes of this machine; options after `--` go to each of them."""

    tensor_parallel_size: int = option(
        "Ranks that share the model, on all machines together",
        default=1,
        unit="ranks",
        minimum=1,
        maximum=1024,
    )
    nnodes: int = option(
        "Machines that have equal numbers of them", default=1, unit="machines", minimum=1, maximum=1024
    )
    node_rank: int = option(
        "Which machine this is; rank 0 is on machine 0", default=0, minimum=0, maximum=1023
    )
    listen_address: str = option(
        "Where the scheduler connects to the first rank here, HOST:PORT; the others have the next ports",
        default="127.0.0.1:50053",
    )
    metrics_address: str = option(
        "Where the probes of all ranks here together are served, HOST:PORT; the next ports have each rank's "
        "own, and its /metrics",
        default="127.0.0.1:9103",
    )
    shutdown_grace: float = option(
        "How long the ranks stay for the scheduler after SIGTERM", default=60.0, unit="seconds", minimum=0
    )


def main(argv: list[str]) -> int:
    """Runs the ranks until told to stop; returns the exit status.

    Raises:
        PreflightError: an option is wrong, or the metrics address is taken.
    """
    border = argv.index("--") if "--" in argv else len(argv)
    config = configuration.load(RanksConfig, "ranks", argv[:border], prog="python -m launcher ranks")
    try:
        specs = rank_specs(config, argv[border + 1 :])
        serve_http("--metrics-address", config.metrics_address, probes(_metrics(config)))
    except AddressError as error:
        raise PreflightError(str(error)) from error
    return asyncio.run(_run(specs))


async def _run(specs: Sequence[ChildSpec]) -> int:
    return await Supervisor(specs, StopSignals(), say).run()


def say(line: str) -> None:
    """Prints it on standard error; a full disk there, or a reader that has gone, must not end the ranks."""
    with suppress(OSError):
        print(line, file=sys.stderr)


def rank_specs(config: RanksConfig, options: Sequence[str]) -> list[ChildSpec]:
    """One process for each rank of this machine, all with `options`.

    Raises:
        PreflightError: ranks and machines don't go together, or `options` say what is each rank's own.
        AddressError: an address is malformed, or leaves too few ports above it.
    """
    if config.tensor_parallel_size % config.nnodes:
        raise PreflightError(
            f"--nnodes {config.nnodes} doesn't divide --tensor-parallel-size {config.tensor_parallel_size}"
        )
    if config.node_rank >= config.nnodes:
        raise PreflightError(f"--node-rank {config.node_rank} must be less than --nnodes {config.nnodes}")
    specs = []
    for index, (name, metrics) in enumerate(_metrics(config).items()):
        flags = {
            "tensor-parallel-size": config.tensor_parallel_size,
            "rank": name.removeprefix("shard-"),
            "listen-address": _later("--listen-address", config.listen_address, index),
            "metrics-address": metrics,
            "shutdown-grace": config.shutdown_grace,
        }
        if twice := [word for word in options if word.partition("=")[0] in {f"--{flag}" for flag in flags}]:
            raise PreflightError(
                f"{twice[0]}: leave it out after --; `ranks` sets it from what stands before"
            )
        own = [f"--{flag}={value}" for flag, value in flags.items()]
        specs.append(
            ChildSpec(
                name=name,
                metrics_address=metrics,
                argv=(sys.executable, "-m", "shard", *options, *own, "--exit-with-parent"),
                environ=shard_environ(config.tensor_parallel_size // config.nnodes),
                stop_within_s=config.shutdown_grace + CLOSING_S,
            )
        )
    return specs


def probes(ranks: Mapping[str, str]) -> WSGIApplication:
    """Answers 200 where all of `ranks`, from name to metrics address, do: they are of use together alone."""

    def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path not in PROBES:
            status, body = "404 Not Found", f"try {', '.join(PROBES)}; /metrics is at the ports of the ranks"
        elif missing := [name for name, address in ranks.items() if get(address, path)[0] != 200]:
            status, body = "503 Service Unavailable", f"not yet: {', '.join(missing)}"
        else:
            status, body = "200 OK", "ok"
        start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
        return [f"{body}\n".encode()]

    return app


def _metrics(config: RanksConfig) -> dict[str, str]:
    """The metrics address of each rank of this machine, by the name of its process."""
    local = config.tensor_parallel_size // config.nnodes
    return {
        f"shard-{config.node_rank * local + index}": _later(
            "--metrics-address", config.metrics_address, index + 1
        )
        for index in range(local)
    }


def _later(option: str, address: str, offset: int) -> str:
    """The address whose port is `offset` after the one that `option` gave."""
    try:
        host, port = split_host_port(address)
    except AddressError as error:
        raise AddressError(f"{option} {error}") from error
    if not 0 < port <= 65535 - offset:
        raise AddressError(
            f"{option} {address}: the ranks take the ports after it, so give one of 1 to 65535"
        )
    return f"[{host}]:{port + offset}" if ":" in host else f"{host}:{port + offset}"
