"""Contenders that run as processes of their own, each in its own session, with a log in build/benchmarks.

Each is to end when its standard input closes, as it does however this process ends.
"""

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from benchmarks.command import BenchmarkError
from benchmarks.results import ROOT

LOGS: Final = ROOT / "build" / "benchmarks"


# What marks a line of a log as the reason for an end, the surest first.
SIGNS: Final = ("python -m ", " ERROR ", "Error: ")


def reason(said: Sequence[str]) -> str:
    """Of the lines of a log, the last of those that are likeliest to say why its process ended."""
    for sign in SIGNS:
        if found := [line for line in said if sign in line]:
            return found[-1]
    return said[-1] if said else ""


class ChildProcess:
    """Standard output is read as lines, standard error goes to the log; ending it ends all of its session."""

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        LOGS.mkdir(parents=True, exist_ok=True)
        self.name = name
        self.log: Path = LOGS / f"{name}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(  # noqa: S603
                command,
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )

    def write_line(self, text: str) -> None:
        """To its standard input."""
        assert self.process.stdin  # noqa: S101
        try:
            print(text, file=self.process.stdin, flush=True)
        except BrokenPipeError:
            raise self.failure() from None

    def read_line(self) -> str:
        """The next line. Raises `BenchmarkError` at the end of output."""
        assert self.process.stdout  # noqa: S101
        line = self.process.stdout.readline()
        if not line:
            raise self.failure()
        return line.rstrip("\n")

    def failure(self) -> BenchmarkError:
        """It ended too early."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        said = reason(self.log.read_text(errors="replace").strip().splitlines())
        why = f": {said[:300]}" if said else ""
        status = self.process.returncode
        return BenchmarkError(f"{self.name} ended with status {status}{why}; see {self.log}")

    def close(self, grace_s: float = 45.0, terminate: bool = True) -> None:
        """Closes its standard input or, with `terminate`, sends SIGTERM; after `grace_s` seconds ends it."""
        assert self.process.stdin  # noqa: S101
        assert self.process.stdout  # noqa: S101
        try:
            if terminate:
                self.process.terminate()
            else:
                self._close_input()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(grace_s)
        finally:
            self._close_input()
            # Also what it left behind in its session.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process.stdout.close()

    def _close_input(self) -> None:
        assert self.process.stdin  # noqa: S101
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
