"""One scheduler process, from start to drain."""

import asyncio
import contextlib
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from common.config import ConfigError, load
from common.lifecycle import calm_garbage_collector, exit_with_parent, stop_event
from common.logs import setup
from common.model_files import ModelFilesError
from common.probes import Probes, serve_probes
from common.rpc import (
    SERVER_OPTIONS,
    AddressError,
    add_health_aio,
    add_reflection,
    bind,
    check_listener,
    check_peer,
    health_status,
)
from common.tls import ClientTls, ServerTls, client_tls, server_tls
from common.tracing import TracingError, start_tracing
from pagoda.scheduler.v1 import scheduler_pb2_grpc
from scheduler import metrics
from scheduler.config import SchedulerConfig
from scheduler.engine import Engine
from scheduler.limits import FatalError
from scheduler.service import SchedulerService
from scheduler.shard_client import GrpcShardClient
from scheduler.shard_group import ShardGroup

if TYPE_CHECKING:
    from scheduler.gateway.service import GatewayService

log = logging.getLogger(__name__)
SERVICE = "pagoda.scheduler.v1.SchedulerService"
HEALTH_PERIOD_S = 0.2


async def serve(config: SchedulerConfig) -> None:
    """Serves until SIGTERM, SIGINT or SIGHUP, then drains.

    Raises:
        AddressError: an address is wrong or taken, or open to other machines without TLS.
        ConfigError: the files for TLS can't be used, or something for a gateway is missing.
        ModelFilesError: the model folder for a gateway can't be read.
        FatalError: the shard and the configuration don't fit together.
        TracingError: traces can't be exported as configured.
    """
    tls = server_tls(config.tls_cert_file, config.tls_key_file, config.tls_client_ca_file)
    shard_tls = client_tls(
        "shard-tls",
        config.shard_tls_ca_file,
        config.shard_tls_cert_file,
        config.shard_tls_key_file,
        config.shard_tls_server_name,
    )
    _check_addresses(config, tls, shard_tls)
    probes = Probes()
    serve_probes(config.metrics_address, probes)
    ranks = config.shard_addresses
    shard = GrpcShardClient(ranks[0], shard_tls) if len(ranks) == 1 else ShardGroup(ranks, shard_tls)
    tracer = start_tracing("scheduler", config.otlp_endpoint)
    engine = Engine(config, shard, probes, tracer)
    metrics.watch(engine)
    service = SchedulerService(engine)
    server = grpc.aio.server(options=SERVER_OPTIONS)
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(service, server)
    health = add_health_aio(server)
    add_reflection(server, [SERVICE])
    bind(server, config.listen_address, tls)
    gateway = _add_gateway(server, config, engine, probes, tls)
    await server.start()

    stop = stop_event()
    running = asyncio.create_task(engine.run())
    stopping = asyncio.create_task(stop.wait())
    following = asyncio.create_task(_follow(probes, health))
    try:
        await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            await running
        log.info("draining, at most %g s", config.shutdown_grace)
        engine.stop_admitting()
        service.announce_draining()
        idle = asyncio.create_task(engine.wait_idle())
        await asyncio.wait(
            {running, idle}, timeout=config.shutdown_grace, return_when=asyncio.FIRST_COMPLETED
        )
    finally:
        # Streams end before the server does: its own stop would wait the whole grace for idle ones.
        service.close_streams()
        if gateway:
            gateway.close()
        health.close()
        for task in (running, stopping, following):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError, FatalError):
            await running
        await server.stop(1)
        await shard.close()
        if tracer is not None:
            await asyncio.to_thread(tracer.close)


def _add_gateway(
    server: grpc.aio.Server, config: SchedulerConfig, engine: Engine, probes: Probes, tls: ServerTls | None
) -> "GatewayService | None":
    """Serves an SMG gateway too, on an address of its own, if one is wanted."""
    if config.gateway_address is None:
        return None
    if config.model is None:
        raise ConfigError("--gateway-address needs --model: a gateway asks for the model's tokenizer")
    try:
        from scheduler.gateway.model import ServedModel
        from scheduler.gateway.service import GatewayService
    except ModuleNotFoundError as error:
        message = f"--gateway-address needs the Python package {error.name}: pip install '.[gateway]'"
        raise ConfigError(message) from error
    model = ServedModel.read(Path(config.model), config.served_model_name)
    gateway = GatewayService(engine, probes, model)
    server.add_generic_rpc_handlers((gateway.rpc_handler(),))
    bind(server, config.gateway_address, tls, "--gateway-address")
    return gateway


async def _follow(probes: Probes, health: Any) -> None:
    """gRPC health says what the readiness probe says."""
    while True:
        for name in ("", SERVICE):
            await health.set(name, health_status(probes.ready))
        await asyncio.sleep(HEALTH_PERIOD_S)


def _check_addresses(config: SchedulerConfig, tls: ServerTls | None, shard_tls: ClientTls | None) -> None:
    if not config.shard_addresses:
        raise AddressError("--shard-addresses: give at least one")
    missing = "" if shard_tls else "--shard-tls-ca-file"
    for place, address in enumerate(config.shard_addresses):
        check_peer("--shard-addresses", address, missing, config.insecure)
        if address in config.shard_addresses[:place]:
            raise AddressError(f"--shard-addresses {address}: stands there twice; each rank has its own")
    check_listener(config.listen_address, tls, config.insecure)
    if config.gateway_address:
        check_listener(config.gateway_address, tls, config.insecure, "--gateway-address")


def main() -> None:
    """Runs `python -m scheduler`."""
    config = load(SchedulerConfig, "scheduler")
    setup("scheduler", config.log_level, config.log_format)
    if config.exit_with_parent:
        exit_with_parent()
    try:
        calm_garbage_collector()
        asyncio.run(serve(config))
    except (AddressError, ConfigError, FatalError, ModelFilesError, TracingError) as error:
        print(f"python -m scheduler: {error}", file=sys.stderr)
        sys.exit(2)
