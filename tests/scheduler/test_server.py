"""What a scheduler refuses before it serves."""

import pytest

from common.rpc import AddressError
from scheduler.config import SchedulerConfig
from scheduler.server import serve


async def test_two_ranks_at_one_address_are_refused() -> None:
    config = SchedulerConfig(shard_addresses=("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:1"))

    with pytest.raises(AddressError, match=r"127\.0\.0\.1:1: stands there twice; each rank has its own"):
        await serve(config)
