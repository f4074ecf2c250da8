"""Contenders that run the same work in turn, so that a change of the machine's speed meets them all."""

import contextlib
import gc
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from benchmarks.workload import Run, Work


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
    makers: Makers, work: Sequence[Work], warm_up: Work, one_at_a_time: bool = False
) -> dict[str, list[Run]]:
    """The runs of each contender by name, one for each round's work in `work`.

    All are loaded at once and take turns, round by round; with `one_at_a_time`, for what doesn't fit in one
    memory together, each has all its rounds before the next one is loaded.
    """
    runs: defaultdict[str, list[Run]] = defaultdict(list)
    with contextlib.ExitStack() as stack:
        loaded: dict[str, Contender] = {}
        for name, make in makers.items():
            if one_at_a_time:
                with opened(make) as contender:
                    contender.run(warm_up)
                    runs[name] = [contender.run(each) for each in work]
            else:
                loaded[name] = stack.enter_context(opened(make))
                loaded[name].run(warm_up)
        for each in work:
            for name, contender in loaded.items():
                runs[name].append(contender.run(each))
    return dict(runs)
