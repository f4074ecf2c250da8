"""What surrounds every HTTP request: its body, its limits in time, its client going away, its metrics."""

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

import grpc
from fastapi import Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router import metrics
from router.auth import Authenticator, Tenant
from router.errors import RequestError
from router.inference import Caller, OpenCalls, checked_trace_context
from router.openai import errors
from router.openai.chat_page import is_of_page
from router.openai.errors import HTTPError
from router.stall import StallWatch
from router.validation import MAX_REQUEST_ID_LENGTH

# For load balancers, which have no key.
HEALTH_PATH: Final = "/health"
MAX_BODY_BYTES: Final = 16 * 1024 * 1024
# A body has so long to arrive, and longer for what it has brought. A client that drips would else hold its
# connection until --request-timeout.
BODY_TIMEOUT_S: Final = 30
MIN_BODY_BYTES_PER_S: Final = 4096


@dataclass
class Call:
    """One HTTP request.

    Attributes:
        request_id: The client's X-Request-Id, or one made up.
        deadline: When it has to be answered, in seconds of the monotonic clock.
        send: Writes to the client, past what frameworks put around an ASGI application's own `send`.
        code: The gRPC code that metrics count it by.
        tenant: Whose key it carries.
    """

    request_id: str
    deadline: float
    send: Send
    code: str = "OK"
    tenant: Tenant = Tenant()

    def fail(self, error: RequestError) -> None:
        """Counts what its client is told."""
        self.code = error.code.name
        metrics.ERRORS.labels(error.reason).inc()


def call_of(request: Request) -> Call:
    """The call that a handler serves."""
    call: Call = request.state.call
    return call


def caller_of(request: Request) -> Caller:
    """Who asks, as the headers say."""
    return Caller(
        method=request.url.path,
        time_remaining=call_of(request).deadline - time.monotonic(),
        trace_context=checked_trace_context(request.headers.get("traceparent", "")),
        tenant=call_of(request).tenant,
    )


class Calls:
    """An ASGI application around another.

    It asks for a key and reads the whole body. Then it lets the application answer until the client goes
    away, stops reading, or has waited too long.

    Attributes:
        leaving: Connections are closed after their answers.
    """

    def __init__(
        self,
        app: ASGIApp,
        open_calls: OpenCalls,
        auth: Authenticator,
        *,
        request_timeout: float,
        write_stall_timeout: float,
        cut_off: Callable[[Any], None],
    ) -> None:
        """`cut_off` breaks the connection of a client, given by its address. Timeouts in seconds."""
        self._app = app
        self._open_calls = open_calls
        self._auth = auth
        self._request_timeout = request_timeout
        self._write_stall_timeout = write_stall_timeout
        self._cut_off = cut_off
        self.leaving = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = time.monotonic()
        request_id = _request_id(scope)
        headers = [(b"x-request-id", request_id.encode())]
        if self.leaving:
            headers.append((b"connection", b"close"))

        def cut_off() -> None:
            call.code = "RESOURCE_EXHAUSTED"
            metrics.ERRORS.labels("CLIENT_STALLED").inc()
            self._cut_off(scope["client"])

        writer = _Writer(send, headers, self._write_stall_timeout, cut_off)
        call = scope["state"]["call"] = Call(request_id, start + self._request_timeout, writer.send)
        with self._open_calls:
            try:
                if scope["path"] != HEALTH_PATH and not is_of_page(scope["path"]):
                    call.tenant = self._auth.authenticate(Headers(scope=scope).get("authorization"))
                await self._answer(scope, receive, writer, call)
            except RequestError as error:
                call.fail(error)
                await writer.end(error, scope, receive)
            finally:
                writer.close()
                # Of a set that is bounded, whatever paths clients try.
                method = getattr(scope.get("route"), "path", "other")
                metrics.count_call(method, call.code, time.monotonic() - start)

    async def _answer(self, scope: Scope, receive: Receive, writer: "_Writer", call: Call) -> None:
        """Runs the application until it is done or its client is gone.

        Raises:
            RequestError: the body is refused, or time is up.
        """
        try:
            async with asyncio.timeout_at(call.deadline):
                body = await _read(scope, receive)
                if body is None:
                    call.code = "CANCELLED"
                    return
                answering = asyncio.ensure_future(self._app(scope, _replay(body), writer.send))
                gone = asyncio.create_task(_disconnected(receive))
                try:
                    await asyncio.wait({answering, gone}, return_when=asyncio.FIRST_COMPLETED)
                    if not answering.done() and call.code == "OK":
                        call.code = "CANCELLED"
                finally:
                    answering.cancel()
                    gone.cancel()
                    # Also takes what the application raised; by then it has answered and logged it.
                    await asyncio.gather(answering, gone, return_exceptions=True)
        except TimeoutError:
            message = f"it took longer than {self._request_timeout:g} s, which is --request-timeout"
            raise RequestError(grpc.StatusCode.DEADLINE_EXCEEDED, message, reason="REQUEST_TIMEOUT") from None


class _Writer:
    """Writes a response, and no longer than a client reads it."""

    def __init__(
        self,
        send: Send,
        headers: Sequence[tuple[bytes, bytes]],
        stall_timeout: float,
        on_stall: Callable[[], None],
    ) -> None:
        self._send = send
        self._headers = headers
        self._watch = StallWatch(stall_timeout, on_stall)
        self._started = False

    async def send(self, message: Message) -> None:
        """Of ASGI. Returns once the client has room for more."""
        if message["type"] == "http.response.start":
            self._started = True
            message["headers"] = [*message["headers"], *self._headers]
        with self._watch:
            await self._send(message)

    async def end(self, error: RequestError, scope: Scope, receive: Receive) -> None:
        """Says why there is no more: as the whole response, or in the stream that has begun."""
        if self._started:
            await self.send({"type": "http.response.body", "body": errors.event(error), "more_body": False})
        else:
            await errors.response(error)(scope, receive, self.send)

    def close(self) -> None:
        """Nothing more is written."""
        self._watch.close()


async def _read(scope: Scope, receive: Receive) -> bytes | None:
    """The body; None if the client goes away meanwhile.

    Raises:
        HTTPError: it isn't JSON, too large or too slow.
    """
    headers = Headers(scope=scope)
    content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if scope["method"] == "POST" and content_type != "application/json":
        message = f"Content-Type: {content_type[:100]!r} must be application/json"
        raise HTTPError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, message, reason="UNSUPPORTED_MEDIA_TYPE")
    announced = headers.get("content-length", "0")
    body = bytearray()
    size = int(announced) if announced.isdecimal() else 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S) as limit:
            start = asyncio.get_running_loop().time()
            while True:
                if max(size, len(body)) > MAX_BODY_BYTES:
                    message = f"the body is larger than {MAX_BODY_BYTES} bytes"
                    raise HTTPError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message, reason="BODY_TOO_LARGE")
                arrived = await receive()
                if arrived["type"] == "http.disconnect":
                    return None
                body += arrived["body"]
                if not arrived["more_body"]:
                    return bytes(body)
                limit.reschedule(start + BODY_TIMEOUT_S + len(body) / MIN_BODY_BYTES_PER_S)
    except TimeoutError:
        message = f"{len(body)} bytes of the body came in time; send {MIN_BODY_BYTES_PER_S} a second or more"
        raise HTTPError(HTTPStatus.REQUEST_TIMEOUT, message, reason="BODY_TIMEOUT") from None


def _replay(body: bytes) -> Receive:
    """An ASGI `receive` of a body that is there."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        return messages.pop() if messages else await asyncio.Future[Message]()

    return receive


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _request_id(scope: Scope) -> str:
    given = Headers(scope=scope).get("x-request-id", "")
    usable = given.isascii() and given.isprintable() and 0 < len(given) <= MAX_REQUEST_ID_LENGTH
    return given if usable else uuid.uuid4().hex
