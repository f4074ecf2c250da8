"""The router process: built, served, drained."""

import asyncio
import logging
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import grpc

from common import rpc
from common.http import listen
from common.lifecycle import calm_garbage_collector, stop_event
from common.metrics import set_model
from common.model_files import ModelFiles
from common.probes import Probes, serve_probes
from common.rpc import AddressError
from common.tls import ClientTls, ServerTls, client_tls, server_tls
from common.tokenizer import Tokenizer
from common.tracing import start_tracing
from router.auth import Authenticator
from router.block_map import serve_block_map
from router.chat_template import ChatTemplate
from router.config import RouterConfig
from router.discovery import PREFIX, Discovery
from router.inference import Inference
from router.prompt import PromptEncoder
from router.replicas import Replicas
from router.service import SERVICE_NAME, InferenceService, KeyGuard
from router.tool_calls import detect

if TYPE_CHECKING:
    from router.openai.server import HTTPServer

# For statuses to reach clients whose requests outlived the grace.
_FAREWELL_S: Final = 1.0
# For calls that came meanwhile to be refused, which to be cut off would tell nobody to go elsewhere.
_LAST_CALLS_S: Final = 0.2
_TICK_S: Final = 1.0
# As gRPC spells it.
_UNLIMITED: Final = 2**31 - 1

_log = logging.getLogger(__name__)


class Router:
    """One router in the running event loop."""

    def __init__(self, config: RouterConfig) -> None:
        """Loads the model's text files and binds the address.

        Raises:
            ModelFilesError: a file of the model folder is missing or broken.
            AddressError: an address can't be parsed or bound, or is open to other machines.
            ConfigError: certificates or API keys can't be used.
            TracingError: traces can't be exported as configured.
        """
        self.tls = server_tls(config.tls_cert_file, config.tls_key_file, config.tls_client_ca_file)
        self.scheduler_tls = client_tls(
            "scheduler-tls",
            config.scheduler_tls_ca_file,
            config.scheduler_tls_cert_file,
            config.scheduler_tls_key_file,
            config.scheduler_tls_server_name,
        )
        auth = Authenticator(config.api_keys_file)
        _check_addresses(config, self.tls, self.scheduler_tls)
        self._tracer = start_tracing("router", config.otlp_endpoint, config.trace_sample_ratio)
        folder = Path(config.model)
        files = ModelFiles.read(folder)
        tokenizer = Tokenizer(files)
        template = ChatTemplate(files) if files.chat_template is not None else None
        self.probes = Probes()
        self._config = config
        self._draining = False
        discovery = Discovery(config.scheduler_addresses)
        self.replicas = Replicas(discovery, self._update_health, self.scheduler_tls)
        self.inference = Inference(
            config,
            config.served_model_name or folder.resolve().name,
            tokenizer,
            PromptEncoder(tokenizer, template, config.max_prompt_bytes),
            self.replicas,
            _tool_call_format(config.tool_call_parser, files),
            self._tracer,
            auth,
        )
        self._server = grpc.aio.server(
            interceptors=[KeyGuard(auth)] if auth.asks_for_keys else [],
            options=[*rpc.SERVER_OPTIONS, *_connection_age(config.max_connection_age)],
            # Requests may come compressed. What goes out is a few bytes at a time, and would only grow.
            compression=grpc.Compression.NoCompression,
        )
        service = InferenceService(self.inference, config.write_stall_timeout)
        self._server.add_generic_rpc_handlers((service.rpc_handler(),))
        self._health = rpc.add_health_aio(self._server)
        rpc.add_reflection(self._server, [SERVICE_NAME])
        self._tasks: set[asyncio.Task[Any]] = set()
        self.port = rpc.bind(self._server, config.listen_address, self.tls)
        self._listener = listen("--http-address", config.http_address) if config.http_address else None
        self.http: HTTPServer | None = None
        # Where it is served, for the chat page to link to.
        self.block_map_address: str | None = None

    async def start(self) -> None:
        """Serves and connects; health says SERVING once a scheduler is connected."""
        await self._set_health()
        await self._server.start()
        if self._listener is not None:
            self.http = self._http_server(self._listener)
        self.replicas.start()
        self._spawn(self._tick())
        self._spawn(self.inference.auth.watch())
        self.probes.started = True

    async def drain(self) -> None:
        """Takes leave: NOT_SERVING, then no new requests, then the running ones end, then all streams."""
        self._draining = True
        await self._set_health()
        await asyncio.sleep(self._config.drain_delay)
        self.inference.refusing = True
        if self.http:
            self.http.leave()
        await _within(self._config.shutdown_grace, self.inference.calls.wait_idle())
        await self.close()

    async def close(self) -> None:
        """Ends at once. Requests that still run get UNAVAILABLE, to resume elsewhere."""
        self.inference.refusing = True
        await self.replicas.close()
        await _within(_FAREWELL_S, self.inference.calls.wait_idle())
        self._health.close()
        if self.http:
            await self.http.close()
        await self._server.stop(_LAST_CALLS_S)
        for task in self._tasks:
            task.cancel()
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)

    def _http_server(self, listener: socket.socket) -> "HTTPServer":
        # FastAPI takes a quarter of a second to import, for nothing where no HTTP is wanted.
        from router.openai.app import create_app
        from router.openai.server import HTTPServer

        return HTTPServer(
            create_app(self.inference, lambda: self.probes.ready, self.block_map_address),
            self.inference.calls,
            listener,
            self.inference.auth,
            self.tls,
            request_timeout=self._config.request_timeout,
            write_stall_timeout=self._config.write_stall_timeout,
        )

    async def _tick(self) -> None:
        while True:
            self.probes.tick()
            await asyncio.sleep(_TICK_S)

    def _update_health(self) -> None:
        if self.replicas.connected:
            welcome = self.replicas.welcome
            set_model(welcome.model_revision, welcome.dtype, self.inference.model_name)
        self._spawn(self._set_health())

    async def _set_health(self) -> None:
        self.probes.ready = not self._draining and bool(self.replicas.connected)
        for name in ("", SERVICE_NAME):
            await self._health.set(name, rpc.health_status(self.probes.ready))

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def run(config: RouterConfig) -> None:
    """Serves until SIGTERM, SIGINT or SIGHUP, then drains.

    Raises:
        ModelFilesError: a file of the model folder is missing or broken.
        AddressError: an address can't be parsed or bound, or is open to other machines.
        ConfigError: certificates or API keys can't be used.
        TracingError: traces can't be exported as configured.
    """
    stop = stop_event()
    router = Router(config)
    serve_probes(config.metrics_address, router.probes)
    if config.block_map_address:
        port = serve_block_map(config.block_map_address, config.scheduler_addresses, router.scheduler_tls)
        router.block_map_address = f"{config.block_map_address.rpartition(':')[0]}:{port}"
        _log.info("block map on http://%s/", router.block_map_address)
    # Calls that ended are in cycles, of gRPC's or of uvicorn's making.
    calm_garbage_collector(10_000, 10, 10)
    await router.start()
    unix = config.listen_address.startswith("unix:")
    address = config.listen_address if unix else f"{config.listen_address.rpartition(':')[0]}:{router.port}"
    _log.info("listening on %s", address)
    if router.http:
        _log.info("HTTP on http://%s:%d/v1", config.http_address.rpartition(":")[0], router.http.port)
    await stop.wait()
    _log.info("draining")
    await router.drain()


def _tool_call_format(parser: str, files: ModelFiles) -> str | None:
    return detect(files.chat_template) if parser == "auto" else parser


def _connection_age(limit_s: float) -> list[tuple[str, int]]:
    """Connections of that age take no new calls; the calls on them go on for as long as they like."""
    return [
        ("grpc.max_connection_age_ms", int(limit_s * 1000)),
        ("grpc.max_connection_age_grace_ms", _UNLIMITED),
    ]


def _check_addresses(config: RouterConfig, tls: ServerTls | None, scheduler_tls: ClientTls | None) -> None:
    if not config.scheduler_addresses:
        raise AddressError("--scheduler-addresses: give at least one")
    missing = "" if scheduler_tls else "--scheduler-tls-ca-file"
    for address in config.scheduler_addresses:
        named = address.removeprefix(PREFIX)
        rpc.check_peer("--scheduler-addresses", named, missing, config.insecure)
        if named != address and named.startswith("unix:"):
            raise AddressError(f"--scheduler-addresses {address}: after {PREFIX} comes HOST:PORT")
    if tls is None:
        missing = "--tls-cert-file and --tls-key-file"
    elif config.api_keys_file is None and not tls.requires_clients:
        missing = "--api-keys-file or --tls-client-ca-file"
    else:
        missing = ""
    rpc.check_exposure("--listen-address", config.listen_address, missing, config.insecure)
    if config.http_address:
        rpc.check_exposure("--http-address", config.http_address, missing, config.insecure)


async def _within(limit_s: float, awaitable: Any) -> None:
    try:
        async with asyncio.timeout(limit_s):
            await awaitable
    except TimeoutError:
        pass
