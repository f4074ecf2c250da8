"""Server-sent events: chunks of an answer as they are made, then `[DONE]`, or an error event."""

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Final

from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from pagoda.v1 import inference_pb2 as pb
from router.errors import RequestError, internal
from router.inference import Running
from router.openai import errors
from router.openai.calls import Call

# Proxies take a connection on which nothing moves for dead.
KEEP_ALIVE_S: Final = 15.0

# `json.dumps` would make an encoder for each chunk.
_to_json: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode

Chunk = dict[str, Any]
# The first is None, once the request is accepted.
Chunks = AsyncGenerator[Chunk | None]


class EventStream(Response):
    """Sends chunks. The headers go out before the first."""

    media_type = "text/event-stream"

    def __init__(self, chunks: Chunks, call: Call) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._chunks = chunks
        self._call = call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Of ASGI."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        last = b"data: [DONE]\n\n"
        keeping_alive = asyncio.create_task(self._keep_alive())
        try:
            async with aclosing(self._chunks):
                async for chunk in self._chunks:
                    await self._write(b"data: " + _to_json(chunk).encode() + b"\n\n")
        except Exception as failure:
            error = failure if isinstance(failure, RequestError) else internal(scope["path"])
            self._call.fail(error)
            last = errors.event(error)
        finally:
            keeping_alive.cancel()
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _keep_alive(self) -> None:
        # Whether or not chunks come as well: it costs nothing, and needs no clock.
        while True:
            await asyncio.sleep(KEEP_ALIVE_S)
            await self._write(b": keep-alive\n\n")

    async def _write(self, data: bytes) -> None:
        await self._call.send({"type": "http.response.body", "body": data, "more_body": True})


async def event_stream(chunks: Chunks, call: Call) -> EventStream:
    """The response, once the request is accepted.

    Raises:
        RequestError: it was refused.
    """
    await anext(chunks)
    return EventStream(chunks, call)


async def merged(runs: Sequence[Running]) -> AsyncGenerator[tuple[int, pb.OutputDelta]]:
    """The deltas of several requests as they come, each with its request's place in `runs`."""
    if len(runs) == 1:  # without a task per delta
        async for delta in runs[0].deltas():
            yield 0, delta
        return
    streams = [run.deltas() for run in runs]
    waiting = {_next(stream): place for place, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                place = waiting.pop(task)
                if (arrived := task.result()) is not None:
                    yield place, arrived
                    waiting[_next(streams[place])] = place
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


def _next(stream: Any) -> "asyncio.Task[pb.OutputDelta | None]":
    async def following() -> pb.OutputDelta | None:
        return await anext(stream, None)

    return asyncio.create_task(following())
