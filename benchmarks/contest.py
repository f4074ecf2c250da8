"""Contenders that run the same work in turn, so that a change of the machine's speed meets them all."""

import contextlib
import gc
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

from benchmarks.workload import Run, Work

# Of the machine, by others, at which figures are still worth something.
BUSY: Final = 0.1


class Contender(Protocol):
    """Runs work until closed."""

    def run(self, work: Work) -> Run:
        """Serves all of it."""

    def close(self) -> None:
        """Ends it."""


Makers = Mapping[str, Callable[[], Contender]]


@contextlib.contextmanager
def opened(make: Callable[[], Contender]) -> Iterator[Contender]:
    """Made now, and closed at the end whatever happens."""
    contender = make()
    try:
        yield contender
    finally:
        contender.close()
        del contender
        gc.collect()


def contest(
    makers: Makers, work: Sequence[Work], warm_up: Work, one_at_a_time: bool = False, settle_s: float = 5.0
) -> dict[str, list[Run]]:
    """The runs of each contender by name, one for each round's work in `work`.

    All are loaded at once and take turns, round by round; with `one_at_a_time`, for what doesn't fit in one
    memory together, each has all its rounds before the next one is loaded. Before each run, threads that
    still spin after another one's work get up to `settle_s` seconds to fall asleep; a machine that stays busy
    is spoken of once.
    """
    busiest = 0.0

    def timed(contender: Contender, each: Work) -> Run:
        nonlocal busiest
        busiest = max(busiest, settle(settle_s))
        return contender.run(each)

    runs: defaultdict[str, list[Run]] = defaultdict(list)
    with contextlib.ExitStack() as stack:
        loaded: dict[str, Contender] = {}
        for name, make in makers.items():
            if one_at_a_time:
                with opened(make) as contender:
                    contender.run(warm_up)
                    runs[name] = [timed(contender, each) for each in work]
            else:
                loaded[name] = stack.enter_context(opened(make))
                loaded[name].run(warm_up)
        for each in work:
            for name, contender in loaded.items():
                runs[name].append(timed(contender, each))
    if busiest > BUSY:
        print(
            f"The machine had other work: {busiest:.0%} of it, once; don't trust the figures", file=sys.stderr
        )
    return dict(runs)


def settle(at_most_s: float) -> float:
    """Waits until the machine is idle; returns how busy it was at last, of 1."""
    busy, ends = 0.0, time.monotonic() + at_most_s
    while time.monotonic() < ends:
        before = _cpu_times()
        time.sleep(0.25)
        total, idle = (after - then for after, then in zip(_cpu_times(), before, strict=True))
        busy = 1 - idle / max(total, 1)
        if busy <= BUSY:
            break
    return busy


def _cpu_times() -> tuple[int, int]:
    """Of all processors since the machine started, in ticks: in all, and idle (proc(5), /proc/stat)."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return sum(fields), fields[3] + fields[4]
