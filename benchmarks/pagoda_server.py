"""Pagoda as its clients meet it: `python -m launcher serve`, asked over gRPC by a client on this machine."""

import asyncio
import re
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import grpc

from benchmarks.child_process import ChildProcess
from benchmarks.command import BenchmarkError
from benchmarks.workload import Answer, Run, Work, WorkRequest
from launcher.preflight import claim_addresses
from pagoda.v1 import inference_pb2 as pb
from pagoda.v1.inference_pb2_grpc import InferenceServiceStub
from pagoda.v1.sampling_pb2 import SamplingParams

METRICS: Final = ("router", "scheduler", "shard")


def serve_command(model: Path, flags: str) -> tuple[list[str], str]:
    """The launcher's command line, and the address that it will listen on."""
    options = ("listen-address", *(f"{name}-metrics-address" for name in METRICS))
    addresses = claim_addresses(dict.fromkeys(options, "127.0.0.1:0"))
    command = [sys.executable, "-m", "launcher", "serve", "--exit-with-parent", "--model", str(model)]
    command += ["--http-address", ""]
    for option, address in addresses.items():
        command += [f"--{option}", address]
    return [*command, *shlex.split(flags)], addresses["listen-address"]


class PagodaServer:
    """A contender. Runs until closed. With `stream`, answers come token by token, otherwise whole."""

    def __init__(self, model: Path, flags: str = "", name: str = "pagoda", stream: bool = True) -> None:
        self._ask = ask if stream else ask_whole
        command, self.address = serve_command(model, flags)
        self._child = ChildProcess(name, command)
        try:
            while not re.search(r"gRPC +\S", self._child.read_line()):
                pass
        except BaseException:
            self._child.close()
            raise

    def run(self, work: Work) -> Run:
        """Asks everything, each request when it arrives."""
        try:
            return asyncio.run(self._ask(self.address, work))
        except grpc.aio.AioRpcError as error:
            said = f"{error.code().name}: {error.details()}"
            raise BenchmarkError(f"{self._child.name} answered {said}; see {self._child.log}") from None

    def close(self) -> None:
        """Ends the launcher and its processes."""
        self._child.close()


def spec(request: WorkRequest, salt: str = "") -> pb.GenerateSpec:
    """Greedy, and past any end-of-sequence token. Runs of different salt share no blocks."""
    return pb.GenerateSpec(
        token_ids=pb.TokenIds(ids=request.prompt),
        sampling=SamplingParams(temperature=0),
        stop=pb.StopConditions(max_tokens=request.max_tokens, ignore_eos=True),
        cache_salt=salt,
    )


async def ask(address: str, work: Work, clock: Callable[[], float] = time.perf_counter) -> Run:
    """One client with one channel; a stream per request."""
    salt = str(time.time_ns())
    async with grpc.aio.insecure_channel(address) as channel:
        await channel.channel_ready()
        stub = InferenceServiceStub(channel)
        began = clock()

        async def one(request: WorkRequest) -> Answer:
            await asyncio.sleep(request.arrival_s - (clock() - began) if request.arrival_s else 0)
            arrived = began + request.arrival_s
            tokens, first, last = 0, 0.0, 0.0
            async for event in stub.GenerateStream(pb.GenerateStreamRequest(spec=spec(request, salt))):
                if count := len(event.delta.token_ids):
                    last = clock() - arrived
                    first = first or last
                    tokens += count
            if tokens != request.max_tokens:
                raise RuntimeError(f"{tokens} tokens came of {request.max_tokens}")
            return Answer(tokens, first, last)

        answers = await asyncio.gather(*map(one, work))
        return Run(clock() - began, sum(answer.tokens for answer in answers), tuple(answers))


async def ask_whole(address: str, work: Work) -> Run:
    """One client with one channel; all requests at once, each answered in one message."""
    salt = str(time.time_ns())
    async with grpc.aio.insecure_channel(address) as channel:
        await channel.channel_ready()
        stub = InferenceServiceStub(channel)
        began = time.perf_counter()
        calls = [stub.Generate(pb.GenerateRequest(spec=spec(request, salt))) for request in work]
        responses = await asyncio.gather(*calls)
        seconds = time.perf_counter() - began
    tokens = [len(response.outputs[0].token_ids) for response in responses]
    if tokens != [request.max_tokens for request in work]:
        raise RuntimeError(f"{tokens} tokens came of {[request.max_tokens for request in work]}")
    return Run(seconds, sum(tokens))
