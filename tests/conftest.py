"""What every suite shares: the time that each took, in the summary."""

from collections import defaultdict
from pathlib import Path

import pytest

_seconds: defaultdict[str, float] = defaultdict(float)
_tests: defaultdict[str, int] = defaultdict(int)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Adds up set-up, call and tear-down per folder of tests/."""
    suite = Path(report.nodeid.split("::")[0]).parent.as_posix()
    _seconds[suite] += report.duration
    _tests[suite] += report.when == "setup"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints one line per suite."""
    terminalreporter.section("time per suite")
    for suite in sorted(_seconds):
        terminalreporter.line(f"{suite}: {_tests[suite]} tests, {_seconds[suite]:.1f} s")
