"""Follows the children's start through their probes."""

import asyncio
import http.client
import re
from collections.abc import Callable, Mapping

from common.rpc import split_host_port

Report = Callable[[str, str, float | None], None]
"""Called with a child's name, its state, and how far it is (0 to 1) if known."""

POLL_S = 0.1
RATIO = re.compile(r"^pagoda_shard_(load|warm_up)_ratio(?:{.*?})? (\S+)$", re.MULTILINE)
WAITING = {
    "router": "waiting for the scheduler",
    "scheduler": "waiting for the shard",
}


async def wait_until_ready(addresses: Mapping[str, str], report: Report) -> None:
    """Returns once every child, by name, says at its metrics address that it is ready."""
    await asyncio.gather(*(_follow(name, address, report) for name, address in addresses.items()))


async def _follow(name: str, address: str, report: Report) -> None:
    while True:
        status, _ = await asyncio.to_thread(get, address, "/readyz")
        if status == 200:
            report(name, "ready", 1.0)
            return
        if status is None:
            report(name, "starting", None)
        else:
            report(name, *((WAITING[name], None) if name in WAITING else await _shard_state(address)))
        await asyncio.sleep(POLL_S)


async def _shard_state(address: str) -> tuple[str, float | None]:
    _, metrics = await asyncio.to_thread(get, address, "/metrics")
    ratios = {name: float(ratio) for name, ratio in RATIO.findall(metrics)}
    if (loaded := ratios.get("load", 1.0)) < 1:
        return "loading weights", loaded
    if 0 < (warm := ratios.get("warm_up", 0.0)) < 1:
        return "warming up", warm
    return "waiting for the scheduler", None


def get(address: str, path: str, timeout_s: float = 5.0) -> tuple[int | None, str]:
    """Status and body over HTTP; None where nobody answers."""
    host, port = split_host_port(address)
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode()
    except (OSError, http.client.HTTPException):
        return None, ""
    finally:
        connection.close()
