"""All ranks of a group as one shard."""

import asyncio

import pytest

from pagoda.shard.v1.shard_pb2 import DescribeResponse
from scheduler.shard_client import GrpcShardClient, ShardError
from scheduler.shard_group import ShardGroup


class Away(GrpcShardClient):
    """Isn't there, and says so once it `may`; then the next one may."""

    def __init__(self, may: asyncio.Event, next_may: asyncio.Event) -> None:
        self._may, self._next_may = may, next_may

    async def describe(self) -> DescribeResponse:
        await self._may.wait()
        self._next_may.set()
        raise ShardError("is away")


async def test_of_several_ranks_that_are_away_the_first_is_named_whichever_says_so_first() -> None:
    group = ShardGroup(["first:1", "second:1"])
    at_once, later = asyncio.Event(), asyncio.Event()
    at_once.set()
    group._ranks = [Away(later, asyncio.Event()), Away(at_once, later)]

    with pytest.raises(ShardError, match=r"^first:1: is away$"):
        await group.describe()
