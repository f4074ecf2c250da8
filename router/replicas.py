"""The schedulers that this router knows, and which of them gets a request."""

import asyncio
import itertools
import uuid
from collections.abc import Callable, Sequence
from typing import Final

from common.tls import ClientTls
from pagoda.scheduler.v1.scheduler_pb2 import Welcome
from router import metrics
from router.affinity import PrefixAffinity
from router.discovery import Discovery
from router.errors import unavailable
from router.scheduler_link import Connection, SchedulerLink

# What flaps in DNS comes or goes once in this time, at most.
RESOLVE_PERIOD_S: Final = 2.0


class Replicas:
    """One link per scheduler.

    One that vanished from DNS gets nothing new; its link stays for as long as something runs there.

    Attributes:
        closed: No connection will come any more.
    """

    def __init__(
        self,
        discovery: Discovery,
        on_change: Callable[[], None] = lambda: None,
        tls: ClientTls | None = None,
        resolve_period_s: float = RESOLVE_PERIOD_S,
    ) -> None:
        """`start` connects; `on_change` is called when a connection comes, drains or goes."""
        self.closed = False
        self._discovery = discovery
        self._tls = tls
        self._router_id = uuid.uuid4().hex
        self._resolve_period_s = resolve_period_s
        # By address.
        self._links: dict[str, SchedulerLink] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._watching: asyncio.Task[None] | None = None
        self._affinity = PrefixAffinity()
        self._on_change = on_change
        self._changed = asyncio.Event()
        self._attempts = itertools.count()
        self._welcome: Welcome | None = None

    def start(self) -> None:
        """Begins to connect."""
        self._follow()
        if self._discovery.names:
            self._watching = asyncio.create_task(self._watch())

    async def close(self) -> None:
        """Ends all streams; what runs on them is lost."""
        self.closed = True
        tasks = [*self._tasks.values(), *([self._watching] if self._watching else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._notify()

    def next_attempt(self) -> int:
        """An attempt number that this router never used, whatever ids its clients choose."""
        return next(self._attempts)

    def choose(self, candidates: Sequence[Connection], hashes: Callable[[], Sequence[bytes]]) -> Connection:
        """The one that is likeliest to have the prompt in its prefix cache, unless it is far busier.

        `hashes`: the prompt's, as `block_hashes` gives them; called only if there is a choice.
        """
        if len(candidates) == 1:
            return candidates[0]
        by_address = {connection.address: connection for connection in candidates}
        loads = {address: connection.outstanding_tokens for address, connection in by_address.items()}
        return by_address[self._affinity.choose(hashes(), loads)]

    @property
    def connected(self) -> list[Connection]:
        """All streams that are up."""
        return [link.connection for link in self._links.values() if link.connection is not None]

    @property
    def available(self) -> list[Connection]:
        """Those that take new requests."""
        known = self._discovery.endpoints
        return [one for one in self.connected if not one.draining and one.address in known]

    def may_serve(self, revision: str) -> bool:
        """Whether a known replica, busy or away, served this model revision last, or nobody knows which."""
        known = self._discovery.endpoints
        return any(
            link.revision in ("", revision) for address, link in self._links.items() if address in known
        )

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
        """Returns once a connection comes, drains or goes, or an address."""
        await self._changed.wait()

    async def _watch(self) -> None:
        while True:
            before = self._discovery.endpoints
            await self._discovery.refresh()
            self._follow()
            if self._discovery.endpoints != before:
                self._notify()
            await asyncio.sleep(self._resolve_period_s)

    def _follow(self) -> None:
        """Links to what is known, and parts from what isn't once nothing runs there."""
        known = self._discovery.endpoints
        for address, endpoint in known.items():
            if address in self._links:
                continue
            link = SchedulerLink(endpoint, self._tls, self._router_id, self._notify)
            self._links[address] = link
            self._tasks[address] = asyncio.create_task(link.run())
        for address in self._links.keys() - known.keys():
            connection = self._links[address].connection
            if connection is None or connection.idle:
                del self._links[address]
                self._tasks.pop(address).cancel()
        self._count()

    def _notify(self) -> None:
        if connected := self.connected:
            self._welcome = connected[-1].welcome
        self._count()
        self._changed.set()
        self._changed = asyncio.Event()
        self._on_change()

    def _count(self) -> None:
        metrics.REPLICAS.labels("known").set(len(self._discovery.endpoints))
        metrics.REPLICAS.labels("up").set(len(self.connected))
        metrics.REPLICAS.labels("available").set(len(self.available))
