"""StallWatch, on a clock that the test moves."""

import asyncio
from collections.abc import Callable

import pytest

from router.stall import StallWatch

LIMIT_S = 10.0


class Loop:
    """Time and timers of an event loop."""

    def __init__(self) -> None:
        self._now = 0.0
        self._timers: dict[float, Callable[[], None]] = {}

    def time(self) -> float:
        return self._now

    def call_at(self, when: float, callback: Callable[[], None]) -> None:
        self._timers[when] = callback

    def call_later(self, delay: float, callback: Callable[[], None]) -> None:
        self.call_at(self._now + delay, callback)

    def run_until(self, moment: float) -> None:
        while due := [when for when in self._timers if when <= moment]:
            self._now = min(due)
            self._timers.pop(self._now)()
        self._now = moment


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Loop:
    loop = Loop()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: loop)
    return loop


@pytest.fixture
def stalls() -> list[float]:
    """When each was told of."""
    return []


@pytest.fixture
def watch(loop: Loop, stalls: list[float]) -> StallWatch:
    return StallWatch(LIMIT_S, lambda: stalls.append(loop.time()))


def test_a_write_may_take_its_time_from_its_own_beginning(
    loop: Loop, watch: StallWatch, stalls: list[float]
) -> None:
    loop.run_until(7)
    with watch:
        loop.run_until(16)
    loop.run_until(30)
    with watch:
        loop.run_until(100)

    assert stalls == [40]


def test_a_later_write_gives_a_stalled_one_no_more_time(
    loop: Loop, watch: StallWatch, stalls: list[float]
) -> None:
    with watch:
        loop.run_until(9)
        with watch:
            loop.run_until(100)

    assert stalls == [10]


def test_a_write_that_ends_gives_the_others_their_time_anew(
    loop: Loop, watch: StallWatch, stalls: list[float]
) -> None:
    with watch:
        loop.run_until(8)
        with watch:
            loop.run_until(9)
        loop.run_until(18)
        assert stalls == []
        loop.run_until(100)

    assert stalls == [19]
