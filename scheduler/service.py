"""SchedulerService: one stream per router."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

import grpc

from common.version import PROTOCOL_VERSION
from pagoda.scheduler.v1.scheduler_pb2 import (
    Draining,
    FlushPrefixCacheRequest,
    FlushPrefixCacheResponse,
    GetBlockMapRequest,
    GetBlockMapResponse,
    ServeRequest,
    ServeResponse,
    Welcome,
)
from pagoda.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceServicer
from scheduler.block_map import block_map
from scheduler.engine import Engine
from scheduler.outbox import Outbox

log = logging.getLogger(__name__)

T = TypeVar("T")


class SchedulerService(SchedulerServiceServicer):
    """Carries submits and aborts to the engine, and each step's tokens back."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._outboxes: dict[Outbox, asyncio.Task[None]] = {}
        self._closing = asyncio.Event()

    async def Serve(  # noqa: N802
        self,
        request_iterator: AsyncIterator[ServeRequest],
        context: grpc.aio.ServicerContext[ServeRequest, ServeResponse],
    ) -> AsyncIterator[ServeResponse]:
        """Hello, Welcome; then until either side ends the stream, which aborts the router's requests."""
        first = await self._unless_closing(anext(aiter(request_iterator), ServeRequest()), context)
        if first.WhichOneof("message") != "hello":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be hello")
        if abs(first.hello.protocol_version - PROTOCOL_VERSION) > 1:
            message = f"the router speaks protocol {first.hello.protocol_version}, this scheduler "
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"{message}{PROTOCOL_VERSION}; they may be one apart",
            )
        await self._unless_closing(self._engine.ready.wait(), context)
        yield ServeResponse(welcome=self._welcome())
        outbox = Outbox()
        reader = asyncio.create_task(self._read(request_iterator, outbox))
        self._outboxes[outbox] = reader
        log.info("router %s connected", first.hello.router_id)
        try:
            async for response in self._messages(outbox, reader):
                yield response
            if outbox.overflowing:
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the router reads too slowly")
        finally:
            log.info("router %s left", first.hello.router_id)
            self._outboxes.pop(outbox)
            reader.cancel()
            self._engine.detach(outbox)

    async def FlushPrefixCache(  # noqa: N802
        self, request: FlushPrefixCacheRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> FlushPrefixCacheResponse:
        """Forgets every cached prefix."""
        return FlushPrefixCacheResponse(freed_blocks=self._engine.flush_prefix_cache())

    async def GetBlockMap(  # noqa: N802
        self, request: GetBlockMapRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> GetBlockMapResponse:
        """The blocks and tables as they are now."""
        if not self._engine.scheduler:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the replica is starting")
        return block_map(self._engine.scheduler)

    async def _unless_closing(
        self, awaitable: Awaitable[T], context: grpc.aio.ServicerContext[ServeRequest, ServeResponse]
    ) -> T:
        """Awaits it, but ends the call once streams close: the server's stop would do so with a traceback."""
        wanted = asyncio.ensure_future(awaitable)
        closing = asyncio.create_task(self._closing.wait())
        try:
            await asyncio.wait({wanted, closing}, return_when=asyncio.FIRST_COMPLETED)
            if not wanted.done():
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the scheduler is stopping")
            return wanted.result()
        finally:
            wanted.cancel()
            closing.cancel()

    def _welcome(self) -> Welcome:
        scheduler, description = self._engine.scheduler, self._engine.description
        assert scheduler  # noqa: S101
        return Welcome(
            protocol_version=PROTOCOL_VERSION,
            model_revision=description.model_revision,
            max_model_len=scheduler.limits.max_model_len,
            vocab_size=scheduler.limits.vocab_size,
            dtype=description.dtype,
            load=self._engine.load(),
        )

    async def _read(self, requests: AsyncIterator[ServeRequest], outbox: Outbox) -> None:
        async for request in requests:
            kind = request.WhichOneof("message")
            if kind == "submit":
                self._engine.submit(outbox, request.submit)
            elif kind == "abort":
                self._engine.abort(outbox, request.abort)

    async def _messages(self, outbox: Outbox, reader: asyncio.Task[None]) -> AsyncIterator[ServeResponse]:
        """What is pending, until the router leaves or falls too far behind."""
        while not outbox.overflowing:
            taker = asyncio.create_task(outbox.take())
            done, _ = await asyncio.wait({taker, reader}, return_when=asyncio.FIRST_COMPLETED)
            if taker not in done:
                taker.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await taker
                return
            for message in taker.result():
                yield message

    def announce_draining(self) -> None:
        """Tells every router that nothing new is taken."""
        for outbox in self._outboxes:
            outbox.add_message(ServeResponse(draining=Draining()))

    def close_streams(self) -> None:
        """Ends every stream, also those still to come; routers resume what is left on another replica."""
        self._closing.set()
        for reader in self._outboxes.values():
            reader.cancel()
