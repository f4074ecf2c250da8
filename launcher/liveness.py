"""Whether a process still answers, or only seems to run."""

import asyncio
import time
from typing import Final

from launcher.readiness import get

HUNG_AFTER_S: Final = 30.0
_POLLS: Final = 10


async def wait_until_hung(address: str, limit_s: float) -> None:
    """Returns once a process that was alive has not been for `limit_s`, as its metrics address has it.

    One that never was alive has not started yet: it is no case for here.
    """
    alive_at = None
    while alive_at is None or time.monotonic() - alive_at < limit_s:
        asked_at = time.monotonic()
        status, _ = await asyncio.to_thread(get, address, "/livez", limit_s / _POLLS)
        if status == 200:
            alive_at = asked_at
        await asyncio.sleep(limit_s / _POLLS)
