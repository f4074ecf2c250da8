"""Without a terminal, start-up is a few plain lines."""

import errno
import io

import pytest
from rich.console import Console

from launcher.display import Display


def test_a_line_is_printed_for_each_state_and_quarter() -> None:
    out = io.StringIO()
    display = Display(Console(file=out, soft_wrap=True))

    display.report("shard", "starting")
    for percent in range(0, 101, 10):
        display.report("shard", "loading", percent / 100)
    display.say("shard ended [exit status 1]")
    display.close()

    assert out.getvalue().splitlines() == [
        "shard: starting",
        "shard: loading 0%",
        "shard: loading 25%",
        "shard: loading 50%",
        "shard: loading 75%",
        "shard: loading",
        "shard ended [exit status 1]",
    ]


class Output(io.StringIO):
    """Standard output that nobody reads once `error` is set."""

    error = 0

    def write(self, text: str) -> int:
        if self.error:
            raise OSError(self.error, "gone")
        return super().write(text)


# A closed terminal, and a pipe whose reader ended.
@pytest.mark.parametrize(("error", "terminal"), [(errno.EIO, True), (errno.EPIPE, False)])
def test_a_reader_that_goes_ends_nothing(error: int, terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # What rich does to the real standard output when a pipe breaks.
    monkeypatch.setattr("os.dup2", lambda *_: None)
    out = Output()
    display = Display(Console(file=out, force_terminal=terminal))
    display.report("model", "loading", 0.5)
    before = out.getvalue()

    out.error = error
    display.report("shard", "loading", 0.5)
    display.say("a line")
    display.close()
    out.error = 0
    display.say("another")

    assert out.getvalue() == before


def test_a_full_disk_silences_nothing_for_longer_than_it_is_full() -> None:
    out = Output()
    display = Display(Console(file=out, soft_wrap=True))

    out.error = errno.ENOSPC
    display.say("a line")
    out.error = 0
    display.say("another [line]")

    assert out.getvalue() == "another [line]\n"
