"""gRPC settings that every process shares: limits, binding, channels, health and reflection."""

import asyncio
import ipaddress
import logging
from collections.abc import Sequence
from typing import Any, Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from common.tls import ClientTls, ServerTls, target_name

MAX_MESSAGE_BYTES: Final = 16 * 1024 * 1024
MIN_PING_INTERVAL_MS: Final = 5_000
# A peer that is gone without a word is noticed 40 s after the last one at most. gRPC's own
# timeout of keepalive doesn't end a connection before that of pings, which is a minute by default.
_KEEPALIVE: Final[list[tuple[str, Any]]] = [
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
]
HEALTH_SERVICE_NAME: Final[str] = health.SERVICE_NAME

SERVER_OPTIONS: Final[list[tuple[str, Any]]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Else a second server binds the same port without a word, and gets half of the calls.
    ("grpc.so_reuseport", 0),
    *_KEEPALIVE,
    ("grpc.keepalive_permit_without_calls", 1),
    # A peer that pings more often, three times over, is cut off with `too_many_pings`. By default gRPC bears
    # a ping every 5 minutes where no data flows, so idle streams would end.
    ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
]

CHANNEL_OPTIONS: Final[list[tuple[str, Any]]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    *_KEEPALIVE,
    # By default a client stops after two pings without data, and would never see that an idle peer is gone.
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Replicas are named by address; a proxy from the environment would stand between this host and itself.
    ("grpc.enable_http_proxy", 0),
    # Processes of one machine must not share a broken connection through the global pool.
    ("grpc.use_local_subchannel_pool", 1),
]

_FAILURES: Final = {code.value[0]: code for code in grpc.StatusCode if code is not grpc.StatusCode.OK}

_log = logging.getLogger(__name__)


class AddressError(ValueError):
    """An address can't be parsed or bound."""


def split_host_port(address: str) -> tuple[str, int]:
    """Splits `host:port` or `[v6]:port`.

    Raises:
        AddressError: there is no port, or it isn't from 0 to 65535.
    """
    host, separator, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not separator or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise AddressError(f"{address!r} is not HOST:PORT with a port from 0 to 65535")
    return host, int(port)


def check_address(option: str, address: str) -> None:
    """Checks `HOST:PORT` or `unix:PATH`, as gRPC takes them. `option` gave the address.

    Raises:
        AddressError: it is neither; the message names the option.
    """
    try:
        if not address.startswith("unix:"):
            split_host_port(address)
        elif not 0 < len(address.removeprefix("unix:").encode()) <= 100:
            raise AddressError(f"{address!r}: a Unix socket's path is 1 to 100 bytes long")
    except AddressError as error:
        raise AddressError(f"{option} {error}") from error


def is_local(address: str) -> bool:
    """Whether nothing but this machine is behind `HOST:PORT` or `unix:PATH`: a Unix socket, or loopback."""
    if address.startswith("unix:"):
        return True
    host, _ = split_host_port(address)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_exposure(option: str, address: str, missing: str, insecure: bool) -> None:
    """Refuses an address beyond this machine while options are `missing` that protect it; none if empty.

    With `insecure`, it only warns.

    Raises:
        AddressError: it is such an address, or none; the message names the option and what is missing.
    """
    check_address(option, address)
    if not missing or is_local(address):
        return
    if not insecure:
        raise AddressError(
            f"{option} {address}: beyond this machine it takes {missing}, "
            "or --insecure if you trust everybody on the way"
        )
    _log.warning("%s %s is beyond this machine, without %s", option, address, missing)


def check_peer(option: str, address: str, missing: str, insecure: bool) -> None:
    """As `check_exposure`, of an address to connect to.

    Raises:
        AddressError: also where it is none that a server can have.
    """
    if address.startswith("dns:"):
        raise AddressError(f"{option} {address}: only --scheduler-addresses takes dns:; give HOST:PORT")
    check_exposure(option, address, missing, insecure)
    if not address.startswith("unix:") and not split_host_port(address)[1]:
        raise AddressError(f"{option} {address}: nobody listens on port 0; give 1 to 65535")


def check_listener(
    address: str, tls: ServerTls | None, insecure: bool, option: str = "--listen-address"
) -> None:
    """Refuses an address beyond this machine, which `option` gave, whose clients prove nothing.

    Raises:
        AddressError: as `check_exposure`.
    """
    mutual = tls is not None and tls.requires_clients
    missing = "" if mutual else "--tls-cert-file, --tls-key-file and --tls-client-ca-file"
    check_exposure(option, address, missing, insecure)


def bind(
    server: grpc.Server | grpc.aio.Server,
    address: str,
    tls: ServerTls | None = None,
    option: str = "--listen-address",
) -> int:
    """Binds a server to the address that `option` gave; returns the port (1 for a Unix socket).

    Raises:
        AddressError: the address is malformed or taken; the message names the option.
    """
    check_address(option, address)
    try:
        if tls is None:
            return int(server.add_insecure_port(address))
        return int(server.add_secure_port(address, tls.credentials()))
    except RuntimeError as error:
        raise AddressError(
            f"{option} {address}: can't be bound; it is in use or not an address of this host"
        ) from error


def channel(address: str, tls: ClientTls | None = None) -> grpc.Channel:
    """A channel to a server at `HOST:PORT` or `unix:PATH`."""
    if tls is None:
        return grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
    return grpc.secure_channel(address, tls.credentials(), options=[*CHANNEL_OPTIONS, *tls.options])


def aio_channel(
    address: str, tls: ClientTls | None = None, server_name: str | None = None
) -> grpc.aio.Channel:
    """The same, for asyncio. `server_name` is whose certificate is expected, if `tls` doesn't say."""
    if tls is None:
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    options = tls.options or target_name(server_name)
    return grpc.aio.secure_channel(address, tls.credentials(), options=[*CHANNEL_OPTIONS, *options])


def add_health(server: grpc.Server) -> health.HealthServicer:
    """Adds the standard health service to a threaded server."""
    servicer = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    return servicer


class ClosingHealth(health.aio.HealthServicer):  # type: ignore[misc, name-defined]
    """The standard health service, whose watches end before the server cancels them, which it would log."""

    def __init__(self) -> None:
        super().__init__()
        self._closing = asyncio.Event()

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:  # noqa: N802
        """Each status, until either side ends it."""
        watching = asyncio.ensure_future(super().Watch(request, context))
        closing = asyncio.create_task(self._closing.wait())
        try:
            await asyncio.wait({watching, closing}, return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                watching.result()
        finally:
            watching.cancel()
            closing.cancel()

    def close(self) -> None:
        """Ends every watch, also those still to come."""
        self._closing.set()


def add_health_aio(server: grpc.aio.Server) -> ClosingHealth:
    """Adds the standard health service to an asyncio server; it is to be closed before the server stops."""
    servicer = ClosingHealth()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    return servicer


def add_reflection(server: grpc.Server | grpc.aio.Server, services: Sequence[str]) -> None:
    """Adds the standard reflection service, which names `services`, health and itself."""
    names = (*services, HEALTH_SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)


async def abort(
    context: Any, code: grpc.StatusCode, details: str, trailing_metadata: tuple[tuple[str, bytes], ...] = ()
) -> None:
    """Ends a call of grpc.aio with a status; the handler is to return then.

    The call keeps what `context.abort` raises, whose traceback leads to the handler, the call and all that
    came with it: a cycle that would last until garbage is collected. Not to be called while an exception is
    handled, which that one would hold as well.
    """
    try:
        await context.abort(code, details, trailing_metadata)
    except grpc.aio.AbortError as error:
        error.__traceback__ = None


def failure_code(number: int) -> grpc.StatusCode:
    """The status with that number; UNKNOWN where no failure has it."""
    return _FAILURES.get(number, grpc.StatusCode.UNKNOWN)


def health_status(serving: bool) -> Any:
    """SERVING or NOT_SERVING."""
    response = health_pb2.HealthCheckResponse
    return response.SERVING if serving else response.NOT_SERVING
