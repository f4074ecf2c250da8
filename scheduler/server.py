"""One scheduler process, from start to drain."""

import asyncio
import contextlib
import logging
import sys

import grpc

from common.config import load
from common.lifecycle import exit_with_parent, stop_event
from common.logs import setup
from common.probes import Probes, serve_probes
from common.rpc import (
    SERVER_OPTIONS,
    AddressError,
    add_health_aio,
    add_reflection,
    bind,
    check_address,
    health_status,
)
from pagoda.scheduler.v1 import scheduler_pb2_grpc
from scheduler import metrics
from scheduler.config import SchedulerConfig
from scheduler.engine import Engine, FatalError
from scheduler.service import SchedulerService
from scheduler.shard_client import GrpcShardClient

log = logging.getLogger(__name__)
SERVICE = "pagoda.scheduler.v1.SchedulerService"


async def serve(config: SchedulerConfig) -> None:
    """Serves until SIGTERM, then drains.

    Raises:
        AddressError: an address is wrong or taken.
        FatalError: the shard and the configuration don't fit together.
    """
    probes = Probes()
    serve_probes(config.metrics_address, probes)
    shard = GrpcShardClient(config.shard_addresses[0])
    engine = Engine(config, shard, probes)
    metrics.watch(lambda: engine.scheduler)
    service = SchedulerService(engine)
    server = grpc.aio.server(options=SERVER_OPTIONS)
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(service, server)
    health = add_health_aio(server)
    add_reflection(server, [SERVICE])
    bind(server, config.listen_address)
    await _set_serving(health, False)
    await server.start()

    stop = stop_event()
    running = asyncio.create_task(engine.run())
    stopping = asyncio.create_task(stop.wait())
    ready = asyncio.create_task(engine.ready.wait())
    try:
        await asyncio.wait({running, stopping, ready}, return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            await _set_serving(health, True)
            await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            await running
        log.info("draining, at most %g s", config.shutdown_grace)
        probes.ready = False
        await _set_serving(health, False)
        service.announce_draining()
        draining = asyncio.create_task(engine.drain(config.shutdown_grace))
        await asyncio.wait({running, draining}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        # Streams end before the server does: its own stop would wait the whole grace for idle ones.
        service.close_streams()
        for task in (running, stopping, ready):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError, FatalError):
            await running
        await server.stop(1)
        await shard.close()


async def _set_serving(health: object, serving: bool) -> None:
    for name in ("", SERVICE):
        await health.set(name, health_status(serving))  # type: ignore[attr-defined]


def main() -> None:
    """Runs `python -m scheduler`."""
    config = load(SchedulerConfig, "scheduler")
    setup("scheduler", config.log_level)
    if config.exit_with_parent:
        exit_with_parent()
    try:
        if len(config.shard_addresses) != 1:
            raise FatalError("--shard-addresses: one shard per replica is served; give one address")
        check_address(config.shard_addresses[0])
        asyncio.run(serve(config))
    except (AddressError, FatalError) as error:
        print(f"scheduler: {error}", file=sys.stderr)
        sys.exit(2)
