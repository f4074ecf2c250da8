"""`python -m benchmarks.soak`, for a quarter of a minute."""

import asyncio

import pytest

from benchmarks import soak

pytestmark = pytest.mark.e2e


def test_a_soak_loses_and_changes_nothing_and_holds_no_block() -> None:
    line = asyncio.run(soak.run(seconds=15, clients=6, seed=1))

    assert (line["lost"], line["changed"]) == (0, 0)
    assert line["answered"] + line["left"] == line["requests"] > 20
    assert sum(count for name, count in line.items() if name.endswith(("sigkill", "sigterm"))) > 0
