"""What the router costs: the same streams through it, over gRPC and over HTTP, and past it.

One router, one scheduler and one shard serve everybody in turn. `scheduler` is a client that speaks the
router's own protocol: token ids in, token ids out. Throughput is that of the 64 requests of
`benchmarks.throughput`, all streamed. Time to first token is that of short requests that come one after
another while 63 others stream.
"""

import asyncio
import contextlib
import itertools
import json
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final, Protocol

import grpc

from benchmarks import models
from benchmarks.child_process import ChildProcess
from benchmarks.command import Parser, execute, positive_int, rounds_of, settle_s
from benchmarks.contest import settle
from benchmarks.pagoda_server import spec
from benchmarks.results import Results, comparison
from benchmarks.workload import Work, WorkRequest, make, offline, output_tokens
from common.rpc import CHANNEL_OPTIONS
from common.version import PROTOCOL_VERSION
from launcher.children import child_specs, metrics_addresses
from launcher.config import ServeConfig
from launcher.preflight import claim_addresses
from launcher.readiness import wait_until_ready
from launcher.socket_folder import socket_folder
from pagoda.scheduler.v1 import scheduler_pb2
from pagoda.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceStub
from pagoda.v1 import inference_pb2 as pb
from pagoda.v1.inference_pb2_grpc import InferenceServiceStub
from pagoda.v1.sampling_pb2 import SamplingParams

DIRECT: Final = "scheduler"
_POLL_S: Final = 0.5
PROBE: Final = WorkRequest(tuple(range(300, 332)), 2)


class Client(Protocol):
    """An open connection."""

    def stream(self, request: WorkRequest) -> AsyncIterator[int]:
        """How many tokens came, each time that some did."""


Connect = Callable[[], contextlib.AbstractAsyncContextManager[Client]]


class GrpcClient:
    """Asks the router over gRPC."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = InferenceServiceStub(channel)

    @classmethod
    @contextlib.asynccontextmanager
    async def connect(cls, address: str) -> AsyncIterator[Client]:
        """To the router."""
        async with grpc.aio.insecure_channel(address) as channel:
            yield cls(channel)

    async def stream(self, request: WorkRequest) -> AsyncIterator[int]:
        """See `Client`."""
        salted = spec(request, str(time.time_ns()))
        async for event in self._stub.GenerateStream(pb.GenerateStreamRequest(spec=salted)):
            if count := len(event.delta.token_ids):
                yield count


class HttpClient:
    """Asks the router over HTTP, by the least that reads its events."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port

    @classmethod
    @contextlib.asynccontextmanager
    async def connect(cls, address: str) -> AsyncIterator[Client]:
        """To the router; each stream has a connection of its own."""
        host, _, port = address.rpartition(":")
        yield cls(host, int(port))

    async def stream(self, request: WorkRequest) -> AsyncIterator[int]:
        """See `Client`."""
        body = json.dumps(
            {
                "prompt": request.prompt,
                "max_tokens": request.max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True, "continuous_usage_stats": True},
                "cache_salt": str(time.time_ns()),
            }
        ).encode()
        reader, writer = await asyncio.open_connection(self._host, self._port)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {self._host}\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        try:
            seen = 0
            async for line in reader:
                if line.startswith(b'data: {"error"'):
                    raise RuntimeError(line.decode())
                if line.startswith(b"data: {"):
                    total = json.loads(line[6:])["usage"]["completion_tokens"]
                    if total > seen:
                        yield total - seen
                        seen = total
        finally:
            writer.close()


class DirectClient:
    """Asks the scheduler as the router does."""

    def __init__(self) -> None:
        self._outbox: asyncio.Queue[scheduler_pb2.ServeRequest] = asyncio.Queue()
        self._queues: dict[str, asyncio.Queue[int]] = {}
        self._numbers: dict[int, asyncio.Queue[int]] = {}
        self._refused: dict[str, str] = {}
        self._ids = itertools.count()

    @classmethod
    @contextlib.asynccontextmanager
    async def connect(cls, address: str) -> AsyncIterator[Client]:
        """To the scheduler."""
        client = cls()
        async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
            call = SchedulerServiceStub(channel).Serve(client._requests())
            responses = aiter(call)
            await anext(responses)
            reading = asyncio.create_task(client._read(responses))
            try:
                yield client
            finally:
                reading.cancel()
                call.cancel()

    async def _requests(self) -> AsyncIterator[scheduler_pb2.ServeRequest]:
        hello = scheduler_pb2.Hello(protocol_version=PROTOCOL_VERSION, router_id="benchmark")
        yield scheduler_pb2.ServeRequest(hello=hello)
        while True:
            yield await self._outbox.get()

    async def _read(self, responses: AsyncIterator[scheduler_pb2.ServeResponse]) -> None:
        async for response in responses:
            match response.WhichOneof("message"):
                case "accepted":
                    self._numbers[response.accepted.number] = self._queues[response.accepted.key.request_id]
                case "refused":
                    name = response.refused.key.request_id
                    self._refused[name] = response.refused.message
                    self._queues[name].put_nowait(0)
                case "outputs":
                    for handle in response.outputs.handles:
                        self._numbers[handle >> 8].put_nowait(1)
                    for output in response.outputs.sequences:
                        self._queues[output.key.request_id].put_nowait(len(output.token_ids))

    async def stream(self, request: WorkRequest) -> AsyncIterator[int]:
        """See `Client`."""
        name, queue = str(next(self._ids)), asyncio.Queue[int]()
        self._queues[name] = queue
        submit = scheduler_pb2.Submit(
            key=scheduler_pb2.RequestKey(request_id=name),
            prompt_token_ids=request.prompt,
            sampling=SamplingParams(temperature=0, top_p=1, repetition_penalty=1, seed=0),
            max_tokens=request.max_tokens,
            n=1,
            cache_salt=str(time.time_ns()),
        )
        self._outbox.put_nowait(scheduler_pb2.ServeRequest(submit=submit))
        tokens = 0
        while tokens < request.max_tokens:
            count = await queue.get()
            if not count:
                raise RuntimeError(self._refused[name])
            tokens += count
            yield count


class Stack:
    """The three processes. Runs until closed."""

    def __init__(self, model: Path, sockets: Path, dtype: str, device: str) -> None:
        config = ServeConfig(dtype=dtype, device=device)
        options = ("listen-address", "http-address", *metrics_addresses(config))
        addresses = claim_addresses(dict.fromkeys(options, "127.0.0.1:0"))
        specs = child_specs(config, addresses, model, model, "model", sockets, None)
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


async def _drain(tokens: AsyncIterator[int]) -> None:
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
    parser.add_size("--probes", 40, 2, "requests whose first token is timed", type=positive_int)
    return parser


async def measure(options: Namespace, results: Results, stack: Stack, vocab_size: int) -> None:
    """Each client in turn, round by round."""
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
            results.line(
                comparison(f"{count} streams, {name}", "output tok/s", rates[name], rates[DIRECT], DIRECT)
            )
            line = comparison(
                f"time to first token beside {count - 1} streams, {name}",
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
    with socket_folder() as sockets:
        stack = Stack(model.folder, sockets, options.dtype, options.device)
        try:
            asyncio.run(stack.unless_ended(measure(options, results, stack, model.vocab_size)))
        finally:
            stack.close()


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs `python -m benchmarks.router`."""
    execute(parse(), arguments, body)


if __name__ == "__main__":
    main()
