"""Clients that stop reading."""

import asyncio
from collections.abc import Callable


class StallWatch:
    """Calls `on_stall` once a write has taken too long. To be entered around each write, and closed.

    Writes may overlap: one that ends shows that the client reads, and gives the others their time anew. All
    of a stream share one timer: one for each would cost a tenth of what a token costs.
    """

    def __init__(self, limit: float, on_stall: Callable[[], None]) -> None:
        """`limit` is how long one write may take, in seconds; `on_stall` is called once at most."""
        self._loop = asyncio.get_running_loop()
        self._limit = limit
        self._on_stall = on_stall
        self._pending = 0
        # Since when a write is pending and none has ended.
        self._since = 0.0
        self._timer = self._loop.call_later(limit, self._check)

    def __enter__(self) -> None:
        if not self._pending:
            self._since = self._loop.time()
        self._pending += 1

    def __exit__(self, *_: object) -> None:
        self._pending -= 1
        if self._pending:
            self._since = self._loop.time()

    def close(self) -> None:
        """Watches no more, and holds nobody any longer whom it would have told."""
        self._timer.cancel()
        self._on_stall = _nobody

    def _check(self) -> None:
        now = self._loop.time()
        due = (self._since if self._pending else now) + self._limit
        if due <= now:
            self._on_stall()
        else:
            self._timer = self._loop.call_at(due, self._check)


def _nobody() -> None:
    """Nothing is left to end."""
