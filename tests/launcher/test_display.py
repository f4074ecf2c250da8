"""Without a terminal, start-up is a few plain lines."""

import io

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
