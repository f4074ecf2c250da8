"""`python -m launcher serve`: one model on this machine, from a path to a printed address."""

import asyncio
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from common import config as configuration
from common.lifecycle import exit_with_parent
from common.paths import cache_root
from common.rpc import split_host_port
from launcher import embedded_model, preflight
from launcher.children import ChildSpec, child_specs, metrics_addresses
from launcher.config import ServeConfig
from launcher.display import Display
from launcher.monitors import MONITORS, check_monitors, monitor_specs
from launcher.readiness import wait_until_ready
from launcher.socket_folder import socket_folder
from launcher.supervisor import StopSignals, Supervisor

SERVICE = "launcher"


def main(argv: list[str]) -> int:
    """Serves until told to stop; returns the exit status.

    Raises:
        PreflightError: something outside has to change first.
    """
    config = configuration.load(ServeConfig, SERVICE, argv, prog="python -m launcher serve")
    if config.exit_with_parent:
        exit_with_parent()
    config_file = configuration.config_path(SERVICE, argv)
    model = Path(config.model).expanduser().resolve() if config.model else embedded_model.embedded_gguf()
    preflight.check_model(model)
    check_monitors({name: getattr(config, name.replace("-", "_")) for name in MONITORS})
    wanted = {"listen-address": config.listen_address, **metrics_addresses(config)}
    for name in ("http-address", "block-map-address", "gateway-address", *MONITORS):
        if address := getattr(config, name.replace("-", "_")):
            wanted[name] = address
    addresses = preflight.claim_addresses(wanted)
    return asyncio.run(_serve(config, config_file, model, addresses))


async def _serve(
    config: ServeConfig, config_file: str | None, model: Path, addresses: Mapping[str, str]
) -> int:
    began = time.monotonic()
    stop = StopSignals()
    display = Display()
    name = config.served_model_name or _model_name(config, model)
    try:
        folder: Path | None = model
        if model.is_file():  # noqa: ASYNC240
            folder = await _import(model, stop, display)
        if folder is None:
            return 0
        with socket_folder() as sockets:
            specs = child_specs(config, addresses, model, folder, name, sockets, config_file)
            monitors = monitor_specs(addresses, specs, sockets)
            supervisor = Supervisor([*specs, *monitors], stop, display.say)

            def report(name: str, state: str, ratio: float | None) -> None:
                if not supervisor.stopping:
                    display.report(name, state, ratio)

            async def welcome() -> None:
                await wait_until_ready({spec.name: spec.metrics_address for spec in specs}, report)
                supervisor.starting = False
                display.close()
                display.say(welcome_text(config, name, addresses, specs, time.monotonic() - began))

            async def farewell() -> None:
                await stop.first.wait()
                welcoming.cancel()
                display.close()
                display.say("Stopping; running requests may finish. Ctrl-C again ends them at once.")

            welcoming, parting = asyncio.create_task(welcome()), asyncio.create_task(farewell())
            try:
                return await supervisor.run()
            finally:
                welcoming.cancel()
                parting.cancel()
    except embedded_model.ImportFailedError as error:
        return error.status
    finally:
        display.close()


async def _import(source: Path, stop: StopSignals, display: Display) -> Path | None:
    """The model folder made from `source`; None when told to stop meanwhile."""

    def progress(done: int, total: int) -> None:
        display.report("model", "converting, this once", done / max(total, 1))

    display.report("model", f"looking up {source.name} in {cache_root()}")
    importing = asyncio.create_task(embedded_model.import_gguf(source, progress))
    stopped = asyncio.create_task(stop.first.wait())
    await asyncio.wait([importing, stopped], return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if importing.done():
        folder = importing.result()
        display.report("model", "ready", 1.0)
        return folder
    importing.cancel()
    with suppress(asyncio.CancelledError):
        await importing
    return None


def _model_name(config: ServeConfig, model: Path) -> str:
    if config.model is None:
        return embedded_model.NAME
    return model.stem if model.is_file() else model.name


def welcome_text(
    config: ServeConfig,
    name: str,
    addresses: Mapping[str, str],
    specs: Sequence[ChildSpec],
    seconds: float,
) -> str:
    """What is printed once all processes are ready, which took so many seconds: where, and how to ask."""
    listen = addresses["listen-address"]
    python = (
        os.path.relpath(sys.executable) if Path(sys.executable).is_relative_to(Path.cwd()) else sys.executable
    )
    http, block_map = addresses.get("http-address"), addresses.get("block-map-address")
    gateway = addresses.get("gateway-address")
    to = "" if listen == ServeConfig.listen_address else f" --address {dialable(listen)}"
    scheme, tls = ("https", " --tls-ca-file CA.pem") if config.tls_cert_file else ("http", "")
    if config.tls_client_ca_file:
        tls += " --tls-cert-file CERT.pem --tls-key-file KEY.pem"
    key = "PAGODA_CHAT_API_KEY=KEY " if config.api_keys_file else ""
    return "\n".join(
        [
            f"Pagoda serves {name} after {seconds:.1f} s.",
            f"  gRPC     {listen}",
            *([f"  HTTP     {scheme}://{dialable(http)}/v1"] if http else []),
            *([f"  chat     {scheme}://{dialable(http)}/"] if http else []),
            *(f"  metrics  http://{spec.metrics_address}/metrics  ({spec.name})" for spec in specs),
            *(
                f"  monitor  http://{dialable(addresses[name])}/  ({name.partition('-')[0]})"
                for name in MONITORS
                if name in addresses
            ),
            *([f"  blocks   http://{dialable(block_map)}/"] if block_map else []),
            *([f"  gateway  grpc://{dialable(gateway)}"] if gateway else []),
            "Ask it something from another terminal:",
            f'  {key}{python} -m launcher chat{to}{tls} --prompt "Why is the sky blue?"',
            "Ctrl-C stops it.",
        ]
    )


def dialable(address: str) -> str:
    """An address to connect to, for one to listen on: a wildcard becomes this machine."""
    host, port = split_host_port(address)
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
