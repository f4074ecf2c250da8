"""Clients that read as little of each answer as they can: what a client costs is not its server's.

`DirectClient` asks a scheduler, `GrpcClient` and `HttpClient` a router. The latter two speak HTTP/2 and
HTTP/1.1 just as far as one server on this machine needs it. A token takes them 20 µs of a core; gRPC's own
client would take more than 40.
"""

import asyncio
import contextlib
import itertools
import json
import re
import time
from collections.abc import AsyncIterator, Callable
from typing import Final, Protocol

import grpc

from benchmarks.command import BenchmarkError
from benchmarks.pagoda_server import spec
from benchmarks.workload import WorkRequest
from common.rpc import CHANNEL_OPTIONS, split_host_port
from common.version import PROTOCOL_VERSION
from pagoda.scheduler.v1 import scheduler_pb2
from pagoda.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceStub
from pagoda.v1 import inference_pb2 as pb
from pagoda.v1.sampling_pb2 import SamplingParams

_GENERATE_STREAM: Final = "/pagoda.v1.InferenceService/GenerateStream"

# HTTP/2 (RFC 9113, section 6): frames, flags, and the largest window, so that none ever has to be enlarged.
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _ACK, _END_HEADERS = 1, 1, 4
_INITIAL_WINDOW_SIZE, _WINDOW, _DEFAULT_WINDOW = 4, 2**31 - 1, 65535
_FRAME_HEAD, _MESSAGE_HEAD = 9, 5


class Client(Protocol):
    """An open connection."""

    def stream(self, request: WorkRequest) -> AsyncIterator[None]:
        """Each time that some of the answer came.

        Raises:
            BenchmarkError: the answer is not what was asked for.
        """


Connect = Callable[[], contextlib.AbstractAsyncContextManager[Client]]


class _Answer:
    """What came of one answer and wasn't looked at yet."""

    def __init__(self, request: WorkRequest) -> None:
        self._expected = request.max_tokens
        self._arrivals: asyncio.Queue[bool] = asyncio.Queue()
        self._last_words = ""
        self.tokens = 0

    def came(self, tokens: int = 0) -> None:
        """Something did, and how many tokens it was if that is known."""
        self.tokens += tokens
        self._arrivals.put_nowait(True)

    def end(self, last_words: str = "") -> None:
        """Nothing more comes; `last_words` may tell why, if that is too early."""
        self._last_words = last_words
        self._arrivals.put_nowait(False)

    async def each(self) -> AsyncIterator[None]:
        """See `Client.stream`."""
        while await self._arrivals.get():
            yield
        if self.tokens != self._expected:
            raise BenchmarkError(f"{self.tokens} tokens instead of {self._expected}: {self._last_words}")


class DirectClient:
    """Asks the scheduler as the router does: token ids in, token ids out, one message per step."""

    def __init__(self) -> None:
        self._outbox: asyncio.Queue[scheduler_pb2.ServeRequest] = asyncio.Queue()
        self._answers: dict[str, _Answer] = {}
        self._numbers: dict[int, _Answer] = {}
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

    async def stream(self, request: WorkRequest) -> AsyncIterator[None]:
        """See `Client`."""
        name = str(next(self._ids))
        answer = self._answers[name] = _Answer(request)
        submit = scheduler_pb2.Submit(
            key=scheduler_pb2.RequestKey(request_id=name),
            prompt_token_ids=request.prompt,
            sampling=SamplingParams(temperature=0, top_p=1, repetition_penalty=1, seed=0),
            max_tokens=request.max_tokens,
            n=1,
            cache_salt=str(time.time_ns()),
        )
        self._outbox.put_nowait(scheduler_pb2.ServeRequest(submit=submit))
        async for _ in answer.each():
            yield

    async def _requests(self) -> AsyncIterator[scheduler_pb2.ServeRequest]:
        hello = scheduler_pb2.Hello(protocol_version=PROTOCOL_VERSION, router_id="benchmark")
        yield scheduler_pb2.ServeRequest(hello=hello)
        while True:
            yield await self._outbox.get()

    async def _read(self, responses: AsyncIterator[scheduler_pb2.ServeResponse]) -> None:
        async for response in responses:
            match response.WhichOneof("message"):
                case "accepted":
                    accepted = response.accepted
                    self._numbers[accepted.number] = self._answers[accepted.key.request_id]
                case "refused":
                    self._answers[response.refused.key.request_id].end(response.refused.message)
                case "outputs":
                    for handle in response.outputs.handles:
                        self._numbers[handle >> 8].came(1)
                    for output in response.outputs.sequences:
                        answer = self._answers[output.key.request_id]
                        answer.came(len(output.token_ids))
                        if output.finish_reason:
                            answer.end()


class GrpcClient(asyncio.Protocol):
    """Asks the router over gRPC, all streams on one connection."""

    def __init__(self, address: str) -> None:
        self._head = _request_head(address)
        self._transport = asyncio.Transport()
        self._answers: dict[int, _Answer] = {}
        self._messages: dict[int, bytearray] = {}
        self._received = bytearray()
        self._ids = itertools.count(1, 2)

    @classmethod
    @contextlib.asynccontextmanager
    async def connect(cls, address: str) -> AsyncIterator[Client]:
        """To the router."""
        loop = asyncio.get_running_loop()
        transport, client = await loop.create_connection(lambda: cls(address), *split_host_port(address))
        try:
            yield client
        finally:
            transport.close()

    async def stream(self, request: WorkRequest) -> AsyncIterator[None]:
        """See `Client`."""
        stream = next(self._ids)
        answer = self._answers[stream] = _Answer(request)
        self._messages[stream] = bytearray()
        message = pb.GenerateStreamRequest(spec=spec(request, str(time.time_ns()))).SerializeToString()
        data = b"\0" + len(message).to_bytes(4) + message
        head = _frame(_HEADERS, self._head, _END_HEADERS, stream)
        self._transport.write(head + _frame(_DATA, data, _END_STREAM, stream))
        try:
            async for _ in answer.each():
                yield
        finally:
            del self._answers[stream], self._messages[stream]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Opens the windows."""
        assert isinstance(transport, asyncio.Transport)  # noqa: S101
        self._transport = transport
        settings = _INITIAL_WINDOW_SIZE.to_bytes(2) + _WINDOW.to_bytes(4)
        preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(_SETTINGS, settings)
        transport.write(preface + _frame(_WINDOW_UPDATE, (_WINDOW - _DEFAULT_WINDOW).to_bytes(4)))

    def data_received(self, data: bytes) -> None:
        """Takes whole frames."""
        received, at = self._received, 0
        received += data
        while len(received) - at >= _FRAME_HEAD:
            size = int.from_bytes(received[at : at + 3])
            end = at + _FRAME_HEAD + size
            if len(received) < end:
                break
            stream = int.from_bytes(received[at + 5 : at + _FRAME_HEAD])
            self._take(received[at + 3], received[at + 4], stream, received[at + _FRAME_HEAD : end])
            at = end
        del received[:at]

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends all answers."""
        for answer in self._answers.values():
            answer.end(f"connection lost: {exc}")

    def _take(self, kind: int, flags: int, stream: int, payload: bytearray) -> None:
        if kind in (_SETTINGS, _PING) and not flags & _ACK:
            self._transport.write(_frame(kind, bytes(payload) if kind == _PING else b"", _ACK))
        elif kind == _GOAWAY:
            self._transport.close()
        elif answer := self._answers.get(stream):
            if kind == _DATA:
                self._take_messages(answer, self._messages[stream], payload)
            elif kind == _RST_STREAM:
                answer.end(f"reset with {int.from_bytes(payload)}")
            # Trailers, whose status is not looked at: an answer that failed lacks tokens.
            elif kind == _HEADERS and flags & _END_STREAM:
                answer.end(payload.decode("ascii", errors="ignore"))

    @staticmethod
    def _take_messages(answer: _Answer, begun: bytearray, data: bytearray) -> None:
        begun += data
        while len(begun) >= _MESSAGE_HEAD:
            end = _MESSAGE_HEAD + int.from_bytes(begun[1:_MESSAGE_HEAD])
            if len(begun) < end:
                break
            message = pb.GenerateStreamResponse.FromString(bytes(begun[_MESSAGE_HEAD:end]))
            del begun[:end]
            if count := len(message.delta.token_ids):
                answer.came(count)


def _frame(kind: int, payload: bytes, flags: int = 0, stream: int = 0) -> bytes:
    return len(payload).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + payload


def _request_head(address: str) -> bytes:
    """Header fields in HPACK (RFC 7541): two of the static table, the others written out."""

    def written(value: str) -> bytes:
        return bytes([len(value)]) + value.encode()

    path, authority = b"\x04" + written(_GENERATE_STREAM), b"\x01" + written(address)
    named = (("content-type", "application/grpc"), ("te", "trailers"))
    post, http = b"\x83", b"\x86"
    return post + http + path + authority + b"".join(b"\0" + written(k) + written(v) for k, v in named)


class HttpClient:
    """Asks the router over HTTP; each stream has a connection of its own."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port

    @classmethod
    @contextlib.asynccontextmanager
    async def connect(cls, address: str) -> AsyncIterator[Client]:
        """To the router."""
        yield cls(*split_host_port(address))

    async def stream(self, request: WorkRequest) -> AsyncIterator[None]:
        """See `Client`."""
        body = json.dumps(
            {
                "prompt": request.prompt,
                "max_tokens": request.max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
                "cache_salt": str(time.time_ns()),
            }
        ).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {self._host}\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        answer = _Answer(request)
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_connection(lambda: _Events(answer), self._host, self._port)
        transport.write(head.encode() + body)
        try:
            async for _ in answer.each():
                yield
        finally:
            transport.close()


class _Events(asyncio.Protocol):
    """Server-sent events of one answer: each is something that came, and a late one says how many tokens."""

    _BEGINNING: Final = b"\ndata: {"
    _TOKENS: Final = re.compile(rb'"completion_tokens":(\d+)')

    def __init__(self, answer: _Answer) -> None:
        self._answer = answer
        self._received = bytearray()
        self._looked_at = 0

    def data_received(self, data: bytes) -> None:
        """Looks for the beginnings of events."""
        self._received += data
        if (found := self._received.rfind(self._BEGINNING, self._looked_at)) >= 0:
            self._looked_at = found + len(self._BEGINNING)
            self._answer.came()

    def connection_lost(self, exc: Exception | None) -> None:
        """The server closes it after its answer."""
        last = bytes(self._received[-1000:])
        self._answer.tokens = sum(map(int, self._TOKENS.findall(last)))
        self._answer.end(last.decode(errors="replace") or f"connection lost: {exc}")
