"""Start-up as a person sees it: bars on a terminal, plain lines elsewhere, nothing once nobody reads."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn

# Plain lines are printed when a ratio passes a multiple of this.
LINE_EVERY = 0.25


class Display:
    """What each named thing is doing. On a terminal the bars vanish when closed; lines said stay."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._tasks: dict[str, TaskID] = {}
        self._lines: dict[str, str] = {}
        self._progress = Progress(
            SpinnerColumn(finished_text="✓"),
            TextColumn("{task.fields[name]:<9}"),
            BarColumn(bar_width=24),
            TextColumn("{task.description}"),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._progress.start()

    def report(self, name: str, state: str, ratio: float | None = None) -> None:
        """`name` is in `state`, and `ratio` (0 to 1) of the way through it if that is known."""
        if self._console.is_terminal:
            with self._unless_nobody_reads():
                if name not in self._tasks:
                    self._tasks[name] = self._progress.add_task("", total=None, name=name)
                total = None if ratio is None else 1.0
                self._progress.update(
                    self._tasks[name], description=state, total=total, completed=ratio or 0.0
                )
            return
        line = f"{name}: {state}"
        if ratio is not None and ratio < 1:
            line += f" {int(ratio / LINE_EVERY) * LINE_EVERY:.0%}"
        if self._lines.get(name) != line:
            self._lines[name] = line
            self.say(line)

    def say(self, line: str) -> None:
        """Prints a line that stays, above the bars if there are any."""
        with self._unless_nobody_reads():
            if self._console.is_terminal:
                self._console.print(line, markup=False)
            elif not self._console.quiet:
                # Rich would print again, later, what a full disk didn't take.
                print(line, file=self._console.file, flush=True)

    def close(self) -> None:
        """Takes the bars away; `say` goes on working."""
        with self._unless_nobody_reads():
            self._progress.stop()

    @contextmanager
    def _unless_nobody_reads(self) -> Iterator[None]:
        """A terminal that was closed, a pipe whose reader ended, or a full disk must not end what is served.

        A disk may get room again.
        """
        try:
            yield
        except (OSError, SystemExit) as error:  # the second is what rich makes of a broken pipe
            full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
            self._console.quiet = not full
