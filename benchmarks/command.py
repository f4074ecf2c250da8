"""What the benchmarks share on the command line: flags, one-line errors, Ctrl-C."""

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NoReturn

from benchmarks.results import FOLDER, Results
from common.lifecycle import stop_signals
from scheduler.admission import RefusedError

WITHOUT_KERNELS: Final = "no CPU kernels are built, so these are figures of plain PyTorch: run `make kernels`"


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
        self._sizes: dict[str, tuple[Any, Any]] = {}
        add = self.add_argument
        add(
            "--quick",
            action="store_true",
            help="little work unless flags ask for more, to see that everything runs; figures mean nothing",
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

    def add_size(self, flag: str, default: Any, quick: Any, help: str, **more: Any) -> None:  # noqa: A002
        """A flag with another default in quick runs."""
        self._sizes[flag.removeprefix("--").replace("-", "_")] = (default, quick)
        text = f"{help} (default: {default}; with --quick: {quick})"
        self.add_argument(flag, default=argparse.SUPPRESS, help=text, **more)

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """With every size."""
        options = super().parse_args(args, namespace)
        for name, (default, quick) in self._sizes.items():
            if not hasattr(options, name):
                setattr(options, name, quick if options.quick else default)
        return options

    def add_serve_flags(self) -> None:
        """How Pagoda is started."""
        self.add_argument(
            "--serve-flags",
            type=shell_words,
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
    """Of `launcher serve`: what the model's flags and those of `Parser.add_serve_flags` ask of it."""
    return f"--device {options.device} --dtype {options.dtype} {options.serve_flags}"


def rounds_of(options: argparse.Namespace, default: int = 3) -> int:
    """How often each contender is measured: as told, else `default` times, or once in a quick run."""
    told: int | None = options.rounds
    return told or (1 if options.quick else default)


def settle_s(options: argparse.Namespace) -> float:
    """How long a run may wait for the machine to fall quiet."""
    return 0.0 if options.quick else 5.0


def shell_words(text: str) -> str:
    """Of a flag: words as a shell takes them."""
    try:
        shlex.split(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from None
    return text


def positive_int(text: str) -> int:
    """Of a flag: 1 or more."""
    return _at_least(1, text)


def positive_float(text: str) -> float:
    """Of a flag: more than 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"must be more than 0, not {text}")
    return number


def count(text: str) -> int:
    """Of a flag: 0 or more."""
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise argparse.ArgumentTypeError(f"must be at least {least}, not {text}")
    return number


@contextmanager
def failing_in_one_line(prog: str) -> Iterator[None]:
    """Ends the process in one line where it can't go on, and on Ctrl-C, SIGTERM or a closed terminal."""
    previous = {number: signal.signal(number, signal.default_int_handler) for number in stop_signals()}
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
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def execute(parser: Parser, arguments: Sequence[str] | None, body: Callable[[Any, Results], None]) -> None:
    """Parses, runs `body` and ends the process in one line where it can't; contenders end with it."""
    options = parser.parse_args(arguments)
    with failing_in_one_line(parser.prog):
        results = _results(parser.name, options)
        complete = False
        try:
            if options.device == "cpu" and not results.cpu_kernels:
                print(f"{parser.prog}: {WITHOUT_KERNELS}", file=sys.stderr)
            body(options, results)
            complete = True
        finally:
            results.close(complete)


def _results(name: str, options: argparse.Namespace) -> Results:
    try:
        return Results(name, options.output, vars(options))
    except OSError as error:
        raise BenchmarkError(f"--output {options.output}: {error.strerror}") from None
