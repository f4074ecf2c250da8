"""A process that answered and no longer does has hung."""

import asyncio
import socket

from common.probes import serve_probes
from launcher.liveness import wait_until_hung
from tests.launcher.fakes import Failing


async def test_what_was_alive_and_is_no_longer_has_hung() -> None:
    probes = Failing()
    port = serve_probes("127.0.0.1:0", probes)

    async with asyncio.timeout(20):
        await wait_until_hung(f"127.0.0.1:{port}", limit_s=0.5)

    assert probes.asked > 1


async def test_what_listens_and_never_was_alive_has_hung() -> None:
    """As a process does that is stopped just after its start: the system still takes its connections."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        async with asyncio.timeout(20):
            await wait_until_hung(f"127.0.0.1:{listening.getsockname()[1]}", limit_s=0.5)
