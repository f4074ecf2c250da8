"""Whether a process still answers, or only seems to run."""

import asyncio
import socket
import time
from typing import Final

from common.rpc import split_host_port
from launcher.readiness import get

HUNG_AFTER_S: Final = 30.0
_POLLS: Final = 10


async def wait_until_hung(address: str, limit_s: float) -> None:
    """Returns once a process that listens at its metrics address has not been alive, there, for `limit_s`.

    One that doesn't listen yet has not started: it is no case for here. The system listens for one that hung
    before it answered for the first time.
    """
    alive_at, wait_s = None, limit_s / _POLLS
    while alive_at is None or time.monotonic() - alive_at < limit_s:
        asked_at = time.monotonic()
        status, _ = await asyncio.to_thread(get, address, "/livez", wait_s)
        if status == 200 or (alive_at is None and await asyncio.to_thread(_listens, address, wait_s)):
            alive_at = asked_at
        await asyncio.sleep(wait_s)


def _listens(address: str, timeout_s: float) -> bool:
    try:
        socket.create_connection(split_host_port(address), timeout_s).close()
    except OSError:
        return False
    return True
