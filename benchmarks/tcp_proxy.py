"""A TCP proxy for networks that fail: it delays, drops, swallows, or passes a little at a time."""

import asyncio
import socket
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

PLENTY_BYTES: Final = 1 << 16


@dataclass(eq=False)
class _Connection:
    """A client's connection and the one that is made for it."""

    writers: list[asyncio.StreamWriter] = field(default_factory=list)
    half_open: bool = False

    def abort(self) -> None:
        """Both ends see a reset."""
        for writer in self.writers:
            writer.transport.abort()


class TcpProxy:
    """Forwards what comes to `address` of its own to `target`.

    Attributes:
        address: `HOST:PORT`, once started.
        delay_s: What every piece waits before it is passed on, each way.
        window_bytes: What is passed on at a time; small ones also make the buffers of new sockets small.
    """

    def __init__(self, target: str) -> None:
        self.address = ""
        self.delay_s = 0.0
        self.window_bytes = PLENTY_BYTES
        self._target = target
        self._swallowing = False
        self._connections: set[_Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listens on a free port."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=PLENTY_BYTES)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def drop(self) -> None:
        """Resets every connection; new ones are taken."""
        for connection in list(self._connections):
            connection.abort()

    def swallow(self) -> None:
        """Nothing passes any more, and nobody is told: neither on connections at hand nor on new ones."""
        self._swallowing = True
        for connection in self._connections:
            connection.half_open = True

    def heal(self) -> None:
        """New connections are whole; those that swallow do so until their ends give up."""
        self._swallowing = False
        self.delay_s = 0.0
        self.window_bytes = PLENTY_BYTES

    async def close(self) -> None:
        """Ends all."""
        if self._server:
            self._server.close()
        self.drop()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._forward(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Connection([writer], self._swallowing)
        self._connections.add(connection)
        try:
            host, _, port = self._target.rpartition(":")
            there, back = await asyncio.open_connection(host, int(port), limit=PLENTY_BYTES)
            connection.writers.append(back)
            if self.window_bytes < PLENTY_BYTES:
                for one in connection.writers:
                    _shrink(one, self.window_bytes)
            await asyncio.gather(self._pass(connection, reader, back), self._pass(connection, there, writer))
        except OSError:
            # Nobody listens there, or one end is gone: so is the other.
            pass
        finally:
            self._connections.discard(connection)
            connection.abort()

    async def _pass(
        self, connection: _Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while data := await reader.read(self.window_bytes):
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            if not connection.half_open:
                writer.write(data)
                await writer.drain()
        if not connection.half_open:
            with suppress(OSError):
                writer.write_eof()


def _shrink(writer: asyncio.StreamWriter, window_bytes: int) -> None:
    sock: socket.socket = writer.get_extra_info("socket")
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, window_bytes)
    writer.transport.set_write_buffer_limits(window_bytes)
