"""All ranks of a tensor-parallel group as one shard: the same bytes to each, one unit of failure."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Final

from common.tls import ClientTls
from pagoda.shard.v1.shard_pb2 import (
    ConfigureRequest,
    ConfigureResponse,
    DescribeResponse,
    ExecuteRequest,
    ExecuteResponse,
)
from pagoda.v1.inference_pb2 import Constraint, PriorOutput
from scheduler.shard_client import ConfigurationError, GrpcShardClient, GrpcStepStream, ShardError

# What every rank of a group must say alike.
_COMMON: Final = (
    "protocol_version",
    "model_revision",
    "dtype",
    "device",
    "vocab_size",
    "max_model_len",
    "kv_bytes_per_token",
)


class GroupStepStream:
    """One open `Execute` per rank. A step is done when all ranks have done it."""

    def __init__(self, streams: Sequence[GrpcStepStream]) -> None:
        self._streams = streams

    async def send(self, command: ExecuteRequest) -> None:
        """Serialises the command once, and sends it to every rank."""
        data = command.SerializeToString()
        for stream in self._streams:
            await stream.write(data)

    async def results(self) -> AsyncIterator[ExecuteResponse]:
        """Rank 0's results, which have the tokens. Raises ShardError when any rank's stream breaks."""
        ranks = [aiter(stream.results()) for stream in self._streams]
        while True:
            first, *others = await asyncio.gather(*map(anext, ranks))
            for rank, other in enumerate(others, start=1):
                if (other.epoch, other.step) != (first.epoch, first.step):
                    raise ShardError(
                        f"rank {rank} answered step {other.step} of epoch {other.epoch}; "
                        f"rank 0 is at step {first.step} of epoch {first.epoch}"
                    )
            yield first

    async def close(self) -> None:
        """Cancels all calls."""
        for stream in self._streams:
            await stream.close()


class ShardGroup:
    """The ranks, in their order."""

    def __init__(self, addresses: Sequence[str], tls: ClientTls | None = None) -> None:
        self._addresses = addresses
        self._ranks = [GrpcShardClient(address, tls) for address in addresses]

    async def describe(self) -> DescribeResponse:
        """What the group holds: as much as the rank with the least memory.

        Raises:
            ShardError: a rank loads or is away.
            ConfigurationError: these are not the ranks of one group, in their order.
        """
        answers = map(self._describe, self._addresses, self._ranks)
        ranks = []
        # In their order, so that while several are away it is always the same one that is named.
        for answer in await asyncio.gather(*answers, return_exceptions=True):
            if isinstance(answer, BaseException):
                raise answer
            ranks.append(answer)
        for index, (address, rank) in enumerate(zip(self._addresses, ranks, strict=True)):
            if (rank.rank, rank.world_size) != (index, len(ranks)):
                raise ConfigurationError(
                    f"the shard at {address} is rank {rank.rank} of {rank.world_size}, and stands in place "
                    f"{index} of {len(ranks)} in --shard-addresses; give all ranks in their order"
                )
            for name in _COMMON:
                mine, first = getattr(rank, name), getattr(ranks[0], name)
                if mine != first:
                    raise ConfigurationError(f"the shard at {address} has {name} {mine}, rank 0 has {first}")
        group = DescribeResponse()
        group.CopyFrom(ranks[0])
        group.kv_capacity_bytes = min(rank.kv_capacity_bytes for rank in ranks)
        group.epoch = max(rank.epoch for rank in ranks)
        return group

    async def _describe(self, address: str, rank: GrpcShardClient) -> DescribeResponse:
        try:
            return await rank.describe()
        except ShardError as error:
            raise ShardError(f"{address}: {error}") from error

    async def configure(self, request: ConfigureRequest) -> ConfigureResponse:
        """Starts an epoch on all ranks, which meet each other meanwhile."""
        responses = await asyncio.gather(*(rank.configure(request) for rank in self._ranks))
        return responses[0]

    async def prepare_constraint(
        self, constraint: Constraint, prior_outputs: Sequence[PriorOutput] = ()
    ) -> None:
        """On rank 0, which samples."""
        await self._ranks[0].prepare_constraint(constraint, prior_outputs)

    def execute(self) -> GroupStepStream:
        """Opens the step streams."""
        return GroupStepStream([rank.execute() for rank in self._ranks])

    async def close(self) -> None:
        """Closes the channels."""
        await asyncio.gather(*(rank.close() for rank in self._ranks))
