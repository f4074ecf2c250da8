"""Serves an application over HTTP in the running event loop, by uvicorn."""

import asyncio
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from common.http import BACKLOG
from common.tls import ServerTls
from router.auth import Authenticator
from router.inference import OpenCalls
from router.openai.calls import Calls

# Further ones are answered with 503.
MAX_CONNECTIONS: Final = 4096
MAX_HEADER_BYTES: Final = 32 * 1024
# More than the 60 s of usual load balancers, or they would send requests into connections that just closed.
KEEP_ALIVE_S: Final = 75


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
        calls = Calls(
            app,
            open_calls,
            auth,
            request_timeout=request_timeout,
            write_stall_timeout=write_stall_timeout,
            cut_off=self._cut_off,
        )
        self._server = _Server(
            uvicorn.Config(
                calls,
                http=_Connection,
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
        """Takes no more connections, closes idle ones, and the others after their answers."""
        self._server.should_exit = True

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
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Gives it as long for its first request as for the next ones."""
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )


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
