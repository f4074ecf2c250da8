"""A process ends by signal, and a child with the process that holds its standard input."""

import signal
import subprocess
import sys

import pytest

from common.lifecycle import stop_signals
from launcher.preflight import ROOT

CHILD = """
import signal
from common.lifecycle import exit_with_parent
exit_with_parent()
print("running", flush=True)
signal.pause()
"""


def test_a_child_exits_when_its_standard_input_closes() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CHILD], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == b"running\n"

        child.stdin.close()

        assert child.wait(timeout=10) == 0


STOPPING = """
import asyncio
from common.lifecycle import stop_event
async def main():
    stop = stop_event()
    print("running", flush=True)
    await stop.wait()
    print("drained")
asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_each_signal_asks_for_an_orderly_end(number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", STOPPING], cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"running\n"

        process.send_signal(number)

        assert process.stdout.read() == b"drained\n"
        assert process.wait(timeout=10) == 0


def test_an_ignored_hangup_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert stop_signals() == [signal.SIGTERM, signal.SIGINT]
    finally:
        signal.signal(signal.SIGHUP, before)
