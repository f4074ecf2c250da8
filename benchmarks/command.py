"""What the benchmarks share on the command line: flags, one-line errors, Ctrl-C."""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from benchmarks.results import FOLDER, Results
from scheduler.admission import RefusedError


class BenchmarkError(Exception):
    """The benchmark can't run here; the message is one line that says what to do."""


class BareParser(argparse.ArgumentParser):
    """Says what is wrong with a flag in one line."""

    def __init__(self, name: str, description: str | None) -> None:
        super().__init__(
            prog=f"python -m benchmarks.{name}",
            description=(description or "").partition("\n")[0],
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
            allow_abbrev=False,
        )
        self.name = name

    def error(self, message: str) -> NoReturn:
        """One line, without the usage."""
        self.exit(2, f"{self.prog}: {message}\n")


class Parser(BareParser):
    """With the flags of every benchmark against others."""

    def __init__(self, name: str, description: str | None) -> None:
        super().__init__(name, description)
        add = self.add_argument
        add(
            "--quick",
            action="store_true",
            help="little work, to see that everything runs; figures mean nothing",
        )
        add("--rounds", type=positive_int, help="runs of each contender, in turn; medians are printed")
        add(
            "--output",
            type=Path,
            nargs="?",
            const=FOLDER,
            metavar="FOLDER",
            help=f"keep the lines there; without a value in benchmarks/{FOLDER.name}",
        )

    def add_model(self) -> None:
        """Which model, where and in which type."""
        self.add_argument(
            "--model", type=Path, help="model folder or .gguf file; by default the embedded model"
        )
        self.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where everybody computes")
        self.add_argument(
            "--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the weights"
        )
        self.add_argument(
            "--serve-flags",
            default="",
            metavar="FLAGS",
            help="further flags of `launcher serve`, in one string",
        )

    def add_peers(self, default: Sequence[str], choices: Sequence[str]) -> None:
        """Against whom."""
        self.add_argument(
            "--peers", nargs="*", choices=choices, default=list(default), help="none if the flag stands alone"
        )


def serve_flags(options: argparse.Namespace) -> str:
    """Of `launcher serve`: what the flags of `Parser.add_model` ask of it."""
    return f"--device {options.device} --dtype {options.dtype} {options.serve_flags}"


def settle_s(options: argparse.Namespace) -> float:
    """How long a run may wait for the machine to fall quiet."""
    return 0.0 if options.quick else 5.0


def positive_int(text: str) -> int:
    """Of a flag: 1 or more."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {text}")
    return int(text)


def positive_float(text: str) -> float:
    """Of a flag: more than 0."""
    if not 0 < float(text) < float("inf"):
        raise argparse.ArgumentTypeError(f"must be more than 0, not {text}")
    return float(text)


def count(text: str) -> int:
    """Of a flag: 0 or more."""
    if int(text) < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, not {text}")
    return int(text)


@contextmanager
def failing_in_one_line(prog: str) -> Iterator[None]:
    """Ends the process in one line where it can't go on, and on Ctrl-C."""
    try:
        yield
    except (BenchmarkError, RefusedError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            os._exit(1)
        print(f"{prog}: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print(f"{prog}: stopped", file=sys.stderr)
        sys.exit(130)


def execute(parser: Parser, arguments: Sequence[str] | None, body: Callable[[Any, Results], None]) -> None:
    """Parses, runs `body` and ends the process in one line where it can't; contenders end with it."""
    options = parser.parse_args(arguments)
    previous = signal.signal(signal.SIGTERM, _interrupt)
    results = Results(parser.name, options.output, vars(options))
    complete = False
    try:
        with failing_in_one_line(parser.prog):
            body(options, results)
            complete = True
    finally:
        signal.signal(signal.SIGTERM, previous)
        results.close(complete)


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
