"""A child ends with the process that holds its standard input."""

import subprocess
import sys

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
