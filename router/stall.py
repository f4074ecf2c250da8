"""Clients that stop reading."""

import asyncio
from collections.abc import Callable


class StallWatch:
    """Calls `on_stall` once a write has taken too long. To be entered around each write, and closed.

    It has one timer for all writes of a stream: one for each would cost a tenth of what a token costs.
    """

    def __init__(self, limit: float, on_stall: Callable[[], None]) -> None:
        """`limit` is how long one write may take, in seconds; `on_stall` is called once at most."""
        self._loop = asyncio.get_running_loop()
        self._limit = limit
        self._on_stall = on_stall
        self._began: float | None = None
        self._timer = self._loop.call_later(limit, self._check)

    def __enter__(self) -> None:
        self._began = self._loop.time()

    def __exit__(self, *_: object) -> None:
        self._began = None

    def close(self) -> None:
        """Watches no more, and holds nobody any longer whom it would have told."""
        self._timer.cancel()
        self._on_stall = _nobody

    def _check(self) -> None:
        now = self._loop.time()
        due = (now if self._began is None else self._began) + self._limit
        if due <= now:
            self._on_stall()
        else:
            self._timer = self._loop.call_at(due, self._check)


def _nobody() -> None:
    """Nothing is left to end."""
