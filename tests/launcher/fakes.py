"""Child processes that do one thing, and a pipe through which they say so; probes that fail."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from common.probes import Probes
from launcher.children import ChildSpec


class Failing(Probes):
    """Alive when it is asked for the first time, and never again."""

    asked = 0

    @property
    def alive(self) -> bool:
        self.asked += 1
        return self.asked == 1


@contextmanager
def event_pipe(folder: Path) -> Iterator[tuple[Path, IO[str]]]:
    """A FIFO that children append lines to, and its reading end, on which `readline` waits for the next."""
    path = folder / "events"
    os.mkfifo(path)
    # Open for both, so that it has no end of file between two writers.
    with open(os.open(path, os.O_RDWR), encoding="utf-8") as lines:
        yield path, lines


def child(name: str, code: str, events: Path, stop_within_s: float = 30.0) -> ChildSpec:
    """A child that runs `code`, in which `tell(line)` writes to the pipe."""
    prelude = f"""
import os, signal, sys, time
def tell(line):
    with open({str(events)!r}, "w") as pipe:
        pipe.write(line + "\\n")
"""
    return ChildSpec(name, "127.0.0.1:1", (sys.executable, "-c", prelude + code), os.environ, stop_within_s)


# Says that it runs and, once terminated, that it stops.
POLITE = """
def stop(*_):
    tell("stopped NAME")
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
tell("started NAME")
while True:
    signal.pause()
"""

STUBBORN = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
tell("started NAME")
while True:
    signal.pause()
"""


def polite(name: str, events: Path) -> ChildSpec:
    """A child that ends when it is asked to."""
    return child(name, POLITE.replace("NAME", name), events)


def stubborn(name: str, events: Path, stop_within_s: float = 30.0) -> ChildSpec:
    """A child that ends only when it is killed."""
    return child(name, STUBBORN.replace("NAME", name), events, stop_within_s)
