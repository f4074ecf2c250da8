"""The schedulers that this router knows, and which of them gets a request."""

import asyncio
import itertools
import uuid
from collections.abc import Callable, Collection, Sequence

from common.tls import ClientTls
from pagoda.scheduler.v1.scheduler_pb2 import Welcome
from router.errors import unavailable
from router.scheduler_link import Connection, SchedulerLink


def choose(candidates: Collection[Connection]) -> Connection:
    """The one with the fewest tokens still to compute."""
    return min(candidates, key=lambda connection: connection.outstanding_tokens)


class Replicas:
    """One link per scheduler address.

    Attributes:
        closed: No connection will come any more.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        on_change: Callable[[], None] = lambda: None,
        tls: ClientTls | None = None,
    ) -> None:
        """`start` connects; `on_change` is called when a connection comes, drains or goes."""
        router_id = uuid.uuid4().hex
        self._links = [SchedulerLink(address, tls, router_id, self._notify) for address in addresses]
        self.closed = False
        self._tasks: list[asyncio.Task[None]] = []
        self._on_change = on_change
        self._changed = asyncio.Event()
        self._attempts = itertools.count()
        self._welcome: Welcome | None = None

    def start(self) -> None:
        """Begins to connect."""
        self._tasks = [asyncio.create_task(link.run()) for link in self._links]

    async def close(self) -> None:
        """Ends all streams; what runs on them is lost."""
        self.closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._notify()

    def next_attempt(self) -> int:
        """An attempt number that this router never used, whatever ids its clients choose."""
        return next(self._attempts)

    @property
    def connected(self) -> list[Connection]:
        """All streams that are up."""
        return [link.connection for link in self._links if link.connection is not None]

    @property
    def available(self) -> list[Connection]:
        """Those that take new requests."""
        return [connection for connection in self.connected if not connection.draining]

    @property
    def welcome(self) -> Welcome:
        """What is served, as the last scheduler to connect said.

        Raises:
            RequestError: UNAVAILABLE, none ever connected.
        """
        if self._welcome is None:
            raise unavailable("no scheduler has connected yet")
        return self._welcome

    async def wait_change(self) -> None:
        """Returns once a connection comes, drains or goes."""
        await self._changed.wait()

    def _notify(self) -> None:
        if connected := self.connected:
            self._welcome = connected[-1].welcome
        self._changed.set()
        self._changed = asyncio.Event()
        self._on_change()
