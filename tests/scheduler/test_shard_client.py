"""The scheduler's way to its shard: where certificates are asked for, and while it connects anew."""

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from common.rpc import SERVER_OPTIONS, bind
from common.tls import client_tls, server_tls
from pagoda.shard.v1.shard_pb2 import DescribeRequest, DescribeResponse, PrepareConstraintResponse
from pagoda.shard.v1.shard_pb2_grpc import ShardServiceServicer, add_ShardServiceServicer_to_server
from pagoda.v1.inference_pb2 import Constraint, PriorOutput
from scheduler.shard_client import ConstraintRefusedError, GrpcShardClient, ShardError
from tests.authority import Authority


class Described(ShardServiceServicer):
    """Says who it is, and does nothing."""

    def Describe(self, request: DescribeRequest, context: Any) -> DescribeResponse:  # noqa: N802
        return DescribeResponse(instance_id="shard")

    def Configure(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise NotImplementedError

    def __init__(self) -> None:
        self.preparing = threading.Event()
        self.go_on = threading.Event()
        self.broken_output: int | None = None

    def PrepareConstraint(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.preparing.set()
        self.go_on.wait()
        return PrepareConstraintResponse(broken_output=self.broken_output)

    def Execute(self, request_iterator: Any, context: Any) -> Any:  # noqa: N802
        raise NotImplementedError


@pytest.fixture
def shard() -> Described:
    return Described()


@pytest.fixture
async def client(shard: Described) -> AsyncIterator[GrpcShardClient]:
    server = grpc.server(ThreadPoolExecutor(2), options=SERVER_OPTIONS)
    add_ShardServiceServicer_to_server(shard, server)
    client = GrpcShardClient(f"127.0.0.1:{bind(server, '127.0.0.1:0')}")
    server.start()
    yield client
    shard.go_on.set()
    await client.close()
    server.stop(0).wait()


async def test_a_certificate_that_is_renewed_opens_the_way(tmp_path: Path) -> None:
    ca = Authority(tmp_path)
    server = grpc.server(ThreadPoolExecutor(2), options=SERVER_OPTIONS)
    add_ShardServiceServicer_to_server(Described(), server)
    port = bind(server, "127.0.0.1:0", server_tls(*ca.issue("shard"), ca.file))
    server.start()
    stranger = Authority(tmp_path, "stranger").issue("scheduler")
    client = GrpcShardClient(f"127.0.0.1:{port}", client_tls("shard-tls", ca.file, *stranger))
    with pytest.raises(ShardError, match="UNAVAILABLE"):
        await client.describe()

    ca.issue("scheduler")

    assert (await client.describe()).instance_id == "shard"
    await client.close()
    server.stop(0).wait()


async def test_a_constraint_that_a_new_connection_cuts_off_is_the_shards_loss(
    shard: Described, client: GrpcShardClient
) -> None:
    preparing = asyncio.create_task(client.prepare_constraint(Constraint(regex="a")))
    await asyncio.to_thread(shard.preparing.wait)

    await client.describe()

    with pytest.raises(ShardError):
        await preparing


async def test_an_output_that_breaks_its_constraint_is_refused_by_its_field(
    shard: Described, client: GrpcShardClient
) -> None:
    shard.broken_output = 1
    shard.go_on.set()

    with pytest.raises(ConstraintRefusedError, match="output 1 has tokens") as caught:
        await client.prepare_constraint(Constraint(regex="a"), [PriorOutput(), PriorOutput(index=1)])

    assert caught.value.field == "spec.prior_outputs"


async def test_whoever_gives_a_constraint_up_is_not_told_of_a_loss(
    shard: Described, client: GrpcShardClient
) -> None:
    preparing = asyncio.create_task(client.prepare_constraint(Constraint(regex="a")))
    await asyncio.to_thread(shard.preparing.wait)

    preparing.cancel()

    with pytest.raises(asyncio.CancelledError):
        await preparing
