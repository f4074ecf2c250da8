"""Faults that clients never see: `python -m benchmarks.faults --quick`, fault by fault."""

import asyncio
from typing import Any

import pytest

from benchmarks import faults

pytestmark = pytest.mark.e2e

REQUESTS = 3
MAX_TOKENS = 400

Lines = dict[str, dict[str, Any]]


def struck(some: dict[str, faults.Fault], replicas: int = 1, ranks: int = 1) -> Lines:
    specs = faults.requests(REQUESTS, MAX_TOKENS)
    limits = (faults.QUICK_HANG_S, faults.QUICK_STEP_TIMEOUT_S)
    lines = asyncio.run(faults.run(some, specs, *limits, replicas, ranks))
    return {line["fault"]: line for line in lines}


def struck_under_launcher(some: dict[str, faults.Fault]) -> Lines:
    specs = faults.requests(REQUESTS, MAX_TOKENS)
    lines = asyncio.run(faults.run_launched(some, specs, faults.QUICK_LAUNCHER))
    return {line["fault"]: line for line in lines}


@pytest.fixture(scope="module")
def lines() -> Lines:
    """Of one cluster, which bears all faults in turn; of two ranks, of two replicas, and of a launcher."""
    return (
        struck(faults.QUICK)
        | struck(faults.OF_RANKS, ranks=2)
        | struck(faults.OF_REPLICAS, replicas=2)
        | struck_under_launcher(faults.OF_LAUNCHER)
    )


@pytest.mark.parametrize("fault", [*faults.QUICK, *faults.OF_RANKS, *faults.OF_REPLICAS, *faults.OF_LAUNCHER])
def test_a_fault_loses_and_changes_nothing(lines: Lines, fault: str) -> None:
    line = lines[fault]

    assert line["struck"] > 0
    assert (line["lost"], line["changed"]) == (0, 0)
