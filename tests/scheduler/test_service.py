"""SchedulerService over real gRPC, on a fake shard."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc
import pytest

from common.probes import Probes
from common.rpc import SERVER_OPTIONS, bind
from common.version import PROTOCOL_VERSION
from pagoda.scheduler.v1.scheduler_pb2 import Abort, Hello, ServeRequest, ServeResponse
from pagoda.scheduler.v1.scheduler_pb2_grpc import (
    SchedulerServiceStub,
    add_SchedulerServiceServicer_to_server,
)
from scheduler.config import SchedulerConfig
from scheduler.engine import Engine
from scheduler.service import SchedulerService
from tests.scheduler.fake_client import FakeShardClient
from tests.scheduler.fake_shard import expected_output
from tests.scheduler.harness import submit
from tests.scheduler.reading import OutputReader

HELLO = ServeRequest(hello=Hello(protocol_version=PROTOCOL_VERSION, router_id="test"))
Call = grpc.aio.StreamStreamCall[ServeRequest, ServeResponse]


class Stack:
    """One scheduler without a process of its own."""

    def __init__(self) -> None:
        self.client = FakeShardClient()
        self.engine = Engine(SchedulerConfig(shard_addresses=("fake",), block_size=4), self.client, Probes())
        self.service = SchedulerService(self.engine)

    def connect(self, channel: grpc.aio.Channel) -> Call:
        return SchedulerServiceStub(channel).Serve()  # type: ignore[call-arg]


@pytest.fixture
async def stack() -> AsyncIterator[tuple[Stack, grpc.aio.Channel]]:
    stack = Stack()
    server = grpc.aio.server(options=SERVER_OPTIONS)
    add_SchedulerServiceServicer_to_server(stack.service, server)
    port = bind(server, "127.0.0.1:0")
    await server.start()
    running = asyncio.create_task(stack.engine.run())
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield stack, channel
    await server.stop(0)
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


async def read(call: Call) -> ServeResponse:
    async with asyncio.timeout(10):
        message = await call.read()
    assert isinstance(message, ServeResponse), "the stream ended"
    return message


async def finish(call: Call, accepted: ServeResponse) -> list[int]:
    reader = OutputReader()
    tokens = [token for output in reader.read(accepted) for token in output.token_ids]
    while True:
        for output in reader.read(await read(call)):
            tokens += output.token_ids
            if output.finish_reason:
                return tokens


async def test_hello_is_answered_with_what_is_served(stack: tuple[Stack, grpc.aio.Channel]) -> None:
    call = stack[0].connect(stack[1])
    await call.write(HELLO)

    welcome = (await read(call)).welcome

    assert (welcome.protocol_version, welcome.model_revision) == (PROTOCOL_VERSION, "revision")
    assert (welcome.max_model_len, welcome.vocab_size, welcome.load.total_blocks) == (256, 1000, 64)


async def test_tokens_come_after_the_acceptance(stack: tuple[Stack, grpc.aio.Channel]) -> None:
    call = stack[0].connect(stack[1])
    await call.write(HELLO)
    await read(call)
    await call.write(ServeRequest(submit=submit("a", [1, 2, 3], 30)))

    accepted = await read(call)
    assert accepted.accepted.key.request_id == "a"
    assert await finish(call, accepted) == expected_output([1, 2, 3], 30)


async def test_a_request_submitted_twice_is_refused_once(stack: tuple[Stack, grpc.aio.Channel]) -> None:
    call = stack[0].connect(stack[1])
    stack[0].client.may_answer.clear()
    await call.write(HELLO)
    await read(call)
    for _ in range(2):
        await call.write(ServeRequest(submit=submit("a", [1, 2, 3], 30)))

    accepted = await read(call)
    assert accepted.HasField("accepted")
    assert (await read(call)).refused.code == grpc.StatusCode.ALREADY_EXISTS.value[0]
    stack[0].client.may_answer.set()
    assert await finish(call, accepted) == expected_output([1, 2, 3], 30)


async def test_abort_and_a_broken_stream_free_the_blocks(stack: tuple[Stack, grpc.aio.Channel]) -> None:
    scheduler_stack, channel = stack
    call = scheduler_stack.connect(channel)
    await call.write(HELLO)
    await read(call)
    scheduler_stack.client.may_answer.clear()
    for name in "abc":
        await call.write(ServeRequest(submit=submit(name, [1, 2, 3], 200)))
        await read(call)
    await call.write(ServeRequest(abort=Abort(key=submit("a", [1]).key)))
    scheduler = scheduler_stack.engine.scheduler
    assert scheduler
    async with asyncio.timeout(5):
        while len(scheduler.running) + len(scheduler.waiting) > 2:  # noqa: ASYNC110
            await asyncio.sleep(0)

    call.cancel()

    async with asyncio.timeout(5):
        while scheduler.running or scheduler.waiting:  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert scheduler.blocks.device.num_used == 0


async def test_draining_is_announced_and_closing_ends_the_stream(
    stack: tuple[Stack, grpc.aio.Channel],
) -> None:
    call = stack[0].connect(stack[1])
    await call.write(HELLO)
    await read(call)

    stack[0].service.announce_draining()
    assert (await read(call)).HasField("draining")

    stack[0].service.close_streams()
    assert await call.read() is grpc.aio.EOF  # type: ignore[attr-defined]
    assert await call.code() is grpc.StatusCode.OK


@pytest.mark.parametrize(
    ("first", "code"),
    [
        (ServeRequest(submit=submit("a", [1])), grpc.StatusCode.INVALID_ARGUMENT),
        (ServeRequest(), grpc.StatusCode.INVALID_ARGUMENT),
        (
            ServeRequest(hello=Hello(protocol_version=PROTOCOL_VERSION + 2)),
            grpc.StatusCode.FAILED_PRECONDITION,
        ),
    ],
)
async def test_a_wrong_first_message_is_refused(
    stack: tuple[Stack, grpc.aio.Channel], first: ServeRequest, code: grpc.StatusCode
) -> None:
    call = stack[0].connect(stack[1])
    await call.write(first)

    assert await call.code() is code


@pytest.mark.parametrize("first", [[], [HELLO]])
async def test_a_stream_that_was_not_welcomed_ends_with_the_others(first: list[ServeRequest]) -> None:
    stack = Stack()
    server = grpc.aio.server(options=SERVER_OPTIONS)
    add_SchedulerServiceServicer_to_server(stack.service, server)
    port = bind(server, "127.0.0.1:0")
    await server.start()
    # No engine runs, so it is never ready.
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = stack.connect(channel)
        for message in first:
            await call.write(message)

        stack.service.close_streams()

        async with asyncio.timeout(10):
            assert await call.code() is grpc.StatusCode.UNAVAILABLE
    await server.stop(0)
