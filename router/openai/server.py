"""Serves an application over HTTP in the running event loop, by uvicorn."""

import asyncio
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from common.http import BACKLOG
from common.tls import ServerTls
from router.auth import Authenticator
from router.inference import OpenCalls
from router.openai.calls import Calls

# At so many, a new one takes the place of one without a request, or is answered with 503.
MAX_CONNECTIONS: Final = 4096
MAX_HEADER_BYTES: Final = 32 * 1024
# More than the 60 s of usual load balancers, or they would send requests into connections that just closed.
KEEP_ALIVE_S: Final = 75
# From the first byte of a request to the end of its headers; and for the rest of a body that came after its
# answer, such as a refusal.
HEAD_TIMEOUT_S: Final = 15


class HTTPServer:
    """One listening address.

    Attributes:
        port: Of it.
    """

    def __init__(
        self,
        app: FastAPI,
        open_calls: OpenCalls,
        listener: socket.socket,
        auth: Authenticator,
        tls: ServerTls | None = None,
        *,
        request_timeout: float,
        write_stall_timeout: float,
    ) -> None:
        """Takes connections from `listener` from now on. Timeouts in seconds."""
        self._socket = listener
        self.port: int = listener.getsockname()[1]
        self._calls = Calls(
            app,
            open_calls,
            auth,
            request_timeout=request_timeout,
            write_stall_timeout=write_stall_timeout,
            cut_off=self._cut_off,
        )
        self._server = _Server(
            uvicorn.Config(
                self._calls,
                http=partial(_Connection, {}),  # type: ignore[arg-type]
                ws="none",
                lifespan="off",
                log_config=None,
                # Whatever else it says is of single clients.
                log_level="error",
                access_log=False,
                proxy_headers=False,
                server_header=False,
                date_header=False,
                backlog=BACKLOG,
                limit_concurrency=MAX_CONNECTIONS,
                timeout_keep_alive=KEEP_ALIVE_S,
                h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            )
        )
        # Loaded first, and its own options for certificates not used: they would read the files once.
        self._server.config.load()
        self._server.config.ssl = tls.ssl_context() if tls else None
        _allow_connections()
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))

    def leave(self) -> None:
        """Closes idle connections, and the others after their answers; new ones have one request each."""
        self._calls.leaving = True
        for connection in self._connections():
            connection.shutdown()

    async def close(self) -> None:
        """Closes what connections there are; what was written still goes out to clients that take it."""
        self._serving.cancel()
        await asyncio.wait({self._serving})
        # There is none if it hadn't begun to serve.
        for listener in getattr(self._server, "servers", ()):
            listener.close()
        self._socket.close()
        for connection in self._connections():
            connection.transport.close()

    def _cut_off(self, client: Any) -> None:
        """Breaks the connection of the client at this address, and drops what it didn't take."""
        for connection in self._connections():
            if connection.client == client:
                connection.transport.abort()

    def _connections(self) -> list[Any]:
        return list(self._server.server_state.connections)


class _Connection(H11Protocol):
    """One connection. While no answer is due it has limited time to send, and makes room for new ones."""

    def __init__(self, idle: "dict[_Connection, None]", **of_uvicorn: Any) -> None:
        """`idle` are those to which no answer is due, of the whole server; who waited longest is first."""
        super().__init__(**of_uvicorn)
        self._idle = idle
        self._deadline: float | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Gives it as long for its first request as for the next ones."""
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )
        if len(self.connections) >= MAX_CONNECTIONS and self._idle:
            longest = next(iter(self._idle))
            del self._idle[longest]
            longest.timeout_keep_alive_handler()
        self._idle[self] = None

    def data_received(self, data: bytes) -> None:
        """Limits the time of what has begun: uvicorn's timer ends with each byte."""
        super().data_received(data)
        self._sort()
        if self._is_idle:
            self._deadline = self._deadline or self.loop.time() + HEAD_TIMEOUT_S
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_at(self._deadline, self.timeout_keep_alive_handler)
        else:
            self._deadline = None

    def on_response_complete(self) -> None:
        """Waits for the next request, which may have arrived already."""
        super().on_response_complete()
        self._sort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Is idle no more."""
        super().connection_lost(exc)
        self._idle.pop(self, None)

    @property
    def _is_idle(self) -> bool:
        """Its head isn't there yet, or its answer is before its body."""
        no_answer_due = self.conn.their_state is h11.IDLE or self.conn.our_state is h11.DONE
        return no_answer_due and not self.transport.is_closing()

    def _sort(self) -> None:
        if self._is_idle:
            self._idle.setdefault(self)
        else:
            self._idle.pop(self, None)


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves them to the process."""
        yield


def _allow_connections() -> None:
    """Raises the limit on open files, which is often 1,024, as far as this user may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * MAX_CONNECTIONS
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard) if hard > 0 else wanted, hard))
