import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagoda.v1.inference_pb2_grpc import InferenceServiceStub
from router.config import RouterConfig
from router.server import Router
from tests.router.fake_scheduler import FakeScheduler
from tests.router.models import write_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
async def fake() -> AsyncIterator[FakeScheduler]:
    fake = FakeScheduler()
    await fake.start()
    yield fake
    await fake.stop()


class Client:
    """A router, its schedulers, and a channel to it."""

    def __init__(self, router: Router, channel: grpc.aio.Channel, schedulers: list[FakeScheduler]) -> None:
        self.router = router
        self.channel = channel
        self.schedulers = schedulers
        self.scheduler = schedulers[0]
        self.stub: Any = InferenceServiceStub(channel)

    async def wait_health(self, status: Any, service: str = "") -> None:
        stub: Any = health_pb2_grpc.HealthStub(self.channel)
        call = stub.Watch(health_pb2.HealthCheckRequest(service=service))
        async for response in call:
            if response.status == status:
                call.cancel()
                return

    async def wait_serving(self) -> None:
        await self.wait_health(health_pb2.HealthCheckResponse.SERVING)


StartRouter = Callable[..., Awaitable[Client]]


@pytest.fixture
async def start_router(model_folder: Path) -> AsyncIterator[StartRouter]:
    """Starts a router with fakes, `schedulers` of them or those given; waits until all are connected."""
    async with AsyncExitStack() as stack:

        async def start(
            schedulers: list[FakeScheduler] | None = None,
            channel_options: list[tuple[str, Any]] | None = None,
            **config: Any,
        ) -> Client:
            fakes = schedulers if schedulers is not None else [FakeScheduler()]
            for fake in fakes:
                await fake.start()
                stack.push_async_callback(fake.stop)
            addresses = tuple(fake.address for fake in fakes)
            settings: dict[str, Any] = {
                "model": str(model_folder),
                "scheduler_addresses": addresses,
                "listen_address": "127.0.0.1:0",
                "http_address": "",
                "shutdown_grace": 5.0,
                "reconnect_timeout": 10.0,
            } | config
            router = Router(RouterConfig(**settings))
            await router.start()
            stack.push_async_callback(router.close)
            options = [("grpc.max_send_message_length", -1), *(channel_options or [])]
            channel = grpc.aio.insecure_channel(f"127.0.0.1:{router.port}", options=options)
            await stack.enter_async_context(channel)
            client = Client(router, channel, fakes)
            await asyncio.gather(*(fake.hellos.get() for fake in fakes))
            while len(router.replicas.connected) < len(fakes):
                await router.replicas.wait_change()
            return client

        yield start


@pytest.fixture
async def client(start_router: StartRouter) -> Client:
    return await start_router()
