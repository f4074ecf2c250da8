"""Start-up is followed through the probes alone."""

import asyncio

from common.probes import Probes, serve_probes
from launcher.preflight import claim_addresses
from launcher.readiness import wait_until_ready
from shard.metrics import LOAD_RATIO, WARM_UP_RATIO


async def test_a_shard_is_followed_from_nothing_to_ready() -> None:
    probes = Probes()
    address = claim_addresses({"shard": "127.0.0.1:0"})["shard"]
    reports: asyncio.Queue[tuple[str, str, float | None]] = asyncio.Queue()

    async def reported(*expected: object) -> None:
        while await reports.get() != expected:
            pass

    waiting = asyncio.create_task(
        wait_until_ready({"shard": address}, lambda *report: reports.put_nowait(report))
    )
    await reported("shard", "starting", None)
    LOAD_RATIO.set(0.25)
    serve_probes(address, probes)
    await reported("shard", "loading weights", 0.25)
    LOAD_RATIO.set(1)
    await reported("shard", "waiting for the scheduler", None)
    WARM_UP_RATIO.set(0.5)
    await reported("shard", "warming up", 0.5)
    probes.ready = True
    await reported("shard", "ready", 1.0)
    await waiting
