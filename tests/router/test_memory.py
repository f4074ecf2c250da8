"""What a call brought goes with the call: nothing of it waits in a cycle for the garbage collector."""

import asyncio
import gc
from typing import Any

import grpc
import pytest

from pagoda.v1 import inference_pb2 as pb
from router.generation import Generation
from tests.memory import uncollected
from tests.router.conftest import Client
from tests.router.fake_scheduler import STOP

TEXT_BYTES = 4_000_000
CALLS = 10
# gRPC holds a call or two that ended until the next ones come.
STILL_HELD = 3


async def status(client: Client, method: str, text: str) -> grpc.StatusCode:
    call: Any
    if method == "Generate":
        call = client.stub.Generate(pb.GenerateRequest(spec=pb.GenerateSpec(text=text)))
    else:
        call = client.stub.GenerateStream(pb.GenerateStreamRequest(spec=pb.GenerateSpec(text=text)))
    code: grpc.StatusCode = await call.code()
    return code


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
async def test_a_request_that_is_too_large_is_not_kept(client: Client, method: str) -> None:
    text = "a" * TEXT_BYTES
    await status(client, method, text)
    with uncollected() as held:
        codes = [await status(client, method, text) for _ in range(CALLS)]
        held_bytes = held()

    assert codes == [grpc.StatusCode.INVALID_ARGUMENT] * CALLS
    assert held_bytes < STILL_HELD * TEXT_BYTES


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
@pytest.mark.parametrize("code", [grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INTERNAL])
async def test_a_request_that_a_scheduler_refuses_is_not_kept(
    client: Client, method: str, code: grpc.StatusCode
) -> None:
    with uncollected():
        for _ in range(CALLS):
            call = asyncio.create_task(status(client, method, "fox"))
            await client.scheduler.refuse(code, "no room")
            assert await call is code
        kept = generations()

    assert kept < STILL_HELD


async def test_a_request_that_is_done_is_not_kept(client: Client) -> None:
    with uncollected():
        for _ in range(CALLS):
            call = asyncio.create_task(status(client, "Generate", "fox"))
            client.scheduler.send(await client.scheduler.accept(), [40, 1], STOP)
            assert await call is grpc.StatusCode.OK
        kept = generations()

    assert kept < STILL_HELD


async def test_a_request_whose_client_left_is_not_kept(client: Client) -> None:
    with uncollected():
        for _ in range(CALLS):
            call: Any = client.stub.GenerateStream(pb.GenerateStreamRequest(spec=pb.GenerateSpec(text="fox")))
            await client.scheduler.accept()
            await call.read()
            call.cancel()
            await client.scheduler.aborts.get()
        kept = generations()

    assert kept < STILL_HELD


def generations() -> int:
    return sum(isinstance(one, Generation) for one in gc.get_objects())
