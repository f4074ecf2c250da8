"""A client as it should be: when its router is lost, it resumes on the next one with what it has."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Final

import grpc

from pagoda.v1 import inference_pb2 as pb
from pagoda.v1.inference_pb2_grpc import InferenceServiceStub

RESUMES: Final = 200
_PAUSE_S: Final = 0.1
_OPTIONS: Final = [
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.use_local_subchannel_pool", 1),
]


class Clients:
    """Channels to every router; each stream begins at the next one."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._channels = [grpc.aio.insecure_channel(address, options=_OPTIONS) for address in addresses]
        self._stubs: list[Any] = [InferenceServiceStub(channel) for channel in self._channels]
        self._next = 0

    def stream(self, spec: pb.GenerateSpec, pause_s: float = 0.0) -> "ResumingStream":
        """Begins a request with one output; it must have a seed, unless it is greedy.

        Its client waits for `pause_s` after each message.
        """
        self._next += 1
        return ResumingStream(self._stubs, self._next, spec, pause_s)

    async def close(self) -> None:
        """Closes the channels."""
        await asyncio.gather(*(channel.close(None) for channel in self._channels))


class ResumingStream:
    """One request, over as many calls as it takes.

    Attributes:
        token_ids: All that came.
        code: How it ended; None while it runs. OK without a finish reason would be a fault, and is UNKNOWN.
        longest_pause_s: Between two tokens, since `watch`.
        ends: How often a finish reason came.
    """

    def __init__(self, stubs: Sequence[Any], first: int, spec: pb.GenerateSpec, pause_s: float) -> None:
        self.token_ids: list[int] = []
        self.code: grpc.StatusCode | None = None
        self.message = ""
        self.longest_pause_s = 0.0
        self.ends = 0
        self.accepted = False
        self._stubs = stubs
        self._turn = first
        self._spec = pb.GenerateSpec()
        self._spec.CopyFrom(spec)
        self._pause_s = pause_s
        self._last = time.monotonic()
        self._grew = asyncio.Event()
        self.task = asyncio.create_task(self._run())

    def watch(self) -> None:
        """Pauses count from now on."""
        self.longest_pause_s, self._last = 0.0, time.monotonic()

    async def wait_tokens(self, count: int) -> None:
        """Returns once there are so many, or it ended."""
        while len(self.token_ids) < count and self.code is None:
            self._grew.clear()
            await self._grew.wait()

    async def _run(self) -> None:
        for _ in range(RESUMES):
            try:
                await self._call(self._stubs[self._turn % len(self._stubs)])
                self.code = grpc.StatusCode.OK if self.ends else grpc.StatusCode.UNKNOWN
                break
            except grpc.aio.AioRpcError as error:
                self.message = error.details() or ""
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    self.code = error.code()
                    break
            self._turn += 1
            await asyncio.sleep(_PAUSE_S)
        else:
            self.code = grpc.StatusCode.UNAVAILABLE
        self._grew.set()

    async def _call(self, stub: Any) -> None:
        spec = self._spec
        if self.token_ids:
            del spec.prior_outputs[:]
            spec.prior_outputs.add(token_ids=self.token_ids)
        async for event in stub.GenerateStream(pb.GenerateStreamRequest(spec=spec)):
            if event.HasField("accepted"):
                self.accepted = True
                spec.sampling.seed = event.accepted.seed
                spec.model_revision = event.accepted.model_revision
            if not event.HasField("delta"):
                continue
            now = time.monotonic()
            self.longest_pause_s = max(self.longest_pause_s, now - self._last)
            self._last = now
            self.token_ids.extend(event.delta.token_ids)
            self.ends += event.delta.finish_reason != 0
            self._grew.set()
            if self._pause_s:
                await asyncio.sleep(self._pause_s)
