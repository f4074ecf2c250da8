"""What gRPC itself does for clients: retries by the service config, compression, connections that age."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from common.rpc import MAX_MESSAGE_BYTES
from pagoda.v1 import inference_pb2 as pb
from pagoda.v1.inference_pb2_grpc import InferenceServiceStub
from router.service import SERVICE_NAME
from tests.router.conftest import Client, StartRouter
from tests.router.fake_scheduler import STOP

SERVICE_CONFIG = (Path(__file__).parents[2] / "protos/pagoda/v1/service_config.json").read_text()
RETRIES = [("grpc.service_config", SERVICE_CONFIG)]
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


def spec(text: str = "fox") -> pb.GenerateSpec:
    return pb.GenerateSpec(text=text)


def test_the_service_config_is_for_our_service() -> None:
    (method_config,) = json.loads(SERVICE_CONFIG)["methodConfig"]

    assert method_config["name"] == [{"service": SERVICE_NAME}]
    # gRPC makes no more attempts, whatever is asked for.
    assert method_config["retryPolicy"]["maxAttempts"] <= 5


async def test_an_answer_is_asked_for_again_while_nobody_takes_the_request(start_router: StartRouter) -> None:
    client = await start_router(channel_options=RETRIES)
    call = client.stub.Generate(pb.GenerateRequest(spec=spec()))
    for _ in range(2):
        await client.scheduler.refuse(UNAVAILABLE, "not yet")
    submit = await client.scheduler.accept()
    client.scheduler.send(submit, [40, 1], STOP)

    assert (await call).usage.completion_tokens == 2


async def test_a_stream_that_began_is_not_asked_for_again(start_router: StartRouter) -> None:
    client = await start_router(channel_options=RETRIES, reconnect_timeout=0)
    call = client.stub.GenerateStream(pb.GenerateStreamRequest(spec=spec()))
    submit = await client.scheduler.accept()
    await call.read()
    client.scheduler.refuse_key(submit, UNAVAILABLE, "gone")

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()

    assert caught.value.code() is UNAVAILABLE
    assert client.scheduler.submits.empty()


async def test_a_compressed_request_is_taken(client: Client) -> None:
    request = pb.TokenizeRequest(text="fox " * 1000)

    plain = await client.stub.Tokenize(request)
    compressed = await client.stub.Tokenize(request, compression=grpc.Compression.Gzip)

    assert plain == compressed


async def test_what_a_request_decompresses_to_has_the_limit_of_a_message(client: Client) -> None:
    bomb = pb.TokenizeRequest(text="a" * 4 * MAX_MESSAGE_BYTES)

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.stub.Tokenize(bomb, compression=grpc.Compression.Gzip)

    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "larger than max" in (caught.value.details() or "")


class Proxy:
    """Hands bytes on, and counts the connections that it was asked for."""

    def __init__(self, port: int) -> None:
        self.connections = 0
        self._port = port

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        upstream = await asyncio.open_connection("127.0.0.1", self._port)
        await asyncio.gather(self._pump(reader, upstream[1]), self._pump(upstream[0], writer))

    async def _pump(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while data := await source.read(65536):
            target.write(data)
            await target.drain()
        target.close()


@asynccontextmanager
async def proxied(client: Client) -> AsyncIterator[tuple[Proxy, Any]]:
    """A proxy to the router, and a stub that goes through it."""
    proxy = Proxy(client.router.port)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield proxy, InferenceServiceStub(channel)


async def test_a_connection_ages_and_its_stream_goes_on(start_router: StartRouter) -> None:
    client = await start_router(max_connection_age=1)
    async with proxied(client) as (proxy, stub):
        call = stub.GenerateStream(pb.GenerateStreamRequest(spec=spec()))
        submit = await client.scheduler.accept()
        await call.read()

        async with asyncio.timeout(20):
            while proxy.connections < 2:
                await stub.GetModel(pb.GetModelRequest())
        client.scheduler.send(submit, [40, 1], STOP)
        delta = (await call.read()).delta

        assert delta.finish_reason == STOP
        assert (await call.read()).usage.completion_tokens == 2
