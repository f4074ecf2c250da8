"""A shard process that computes nothing and takes its time, as the rest of the machine sees one on a GPU."""

import argparse
import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

import grpc

from benchmarks.instant_shard import InstantShard
from common.lifecycle import calm_garbage_collector, exit_with_parent
from common.probes import Probes, serve_probes
from common.rpc import SERVER_OPTIONS
from pagoda.shard.v1.shard_pb2 import (
    ConfigureRequest,
    ConfigureResponse,
    DescribeRequest,
    DescribeResponse,
    ExecuteRequest,
    ExecuteResponse,
    PrepareConstraintRequest,
    PrepareConstraintResponse,
)
from pagoda.shard.v1.shard_pb2_grpc import ShardServiceServicer, add_ShardServiceServicer_to_server

_BLOCK_SIZE: Final = 16
_NUM_BLOCKS: Final = 50_000
_TICK_S: Final = 1.0


class RestingShard(ShardServiceServicer):
    """Serves one scheduler."""

    def __init__(self, step_s: float, vocab_size: int) -> None:
        """Each step takes `step_s` seconds, whatever is in it."""
        self._step_s = step_s
        self._shard = InstantShard(_NUM_BLOCKS, _BLOCK_SIZE, vocab_size)

    async def Describe(self, request: DescribeRequest, context: Any) -> DescribeResponse:  # noqa: N802
        """See `InstantShard`."""
        return await self._shard.describe()

    async def Configure(self, request: ConfigureRequest, context: Any) -> ConfigureResponse:  # noqa: N802
        """See `InstantShard`."""
        return await self._shard.configure(request)

    async def PrepareConstraint(  # noqa: N802
        self, request: PrepareConstraintRequest, context: Any
    ) -> PrepareConstraintResponse:
        """See `InstantShard`."""
        await self._shard.prepare_constraint(request.constraint, request.prior_outputs)
        return PrepareConstraintResponse()

    async def Execute(  # noqa: N802
        self, requests: AsyncIterator[ExecuteRequest], context: Any
    ) -> AsyncIterator[ExecuteResponse]:
        """One command after the other."""
        stream = self._shard.execute()

        async def read() -> None:
            async for request in requests:
                await stream.send(request)

        reading = asyncio.create_task(read())
        try:
            async for response in stream.results():
                await asyncio.sleep(self._step_s)
                yield response
                stream.may_answer.release()
        finally:
            reading.cancel()


async def serve(options: argparse.Namespace) -> None:
    """Until killed."""
    probes = Probes()
    serve_probes(options.metrics_address, probes)
    server = grpc.aio.server(options=SERVER_OPTIONS)
    shard = RestingShard(options.step_ms / 1000, options.vocab_size)
    add_ShardServiceServicer_to_server(shard, server)
    server.add_insecure_port(options.listen_address)
    await server.start()
    probes.started = probes.ready = True
    while True:
        probes.tick()
        await asyncio.sleep(_TICK_S)


def main() -> None:
    """Runs `python -m benchmarks.resting_shard`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.resting_shard", description=__doc__)
    parser.add_argument("--listen-address", required=True)
    parser.add_argument("--metrics-address", required=True)
    parser.add_argument("--step-ms", type=float, required=True)
    parser.add_argument("--vocab-size", type=int, required=True)
    options = parser.parse_args()
    exit_with_parent()
    calm_garbage_collector()
    asyncio.run(serve(options))


if __name__ == "__main__":
    main()
