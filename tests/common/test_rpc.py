"""Options are known to gRPC and go together; addresses are checked before they are used, and bound once."""

import ast
import asyncio
from collections.abc import Iterator
from concurrent import futures
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc._cython import cygrpc  # type: ignore[attr-defined]
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.tcp_proxy import TcpProxy
from common.rpc import (
    CHANNEL_OPTIONS,
    SERVER_OPTIONS,
    AddressError,
    add_health_aio,
    bind,
    check_address,
    check_peer,
    failure_code,
    split_host_port,
)

ROOT = Path(__file__).parents[2]
FOLDERS = ("benchmarks", "common", "examples", "launcher", "router", "scheduler", "shard", "tests")


def options_named(path: Path) -> Iterator[str]:
    """The gRPC options in a file: the first of two, and a dotted name that begins with `grpc.`."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Tuple(elts=[ast.Constant(value=str(name)), _]) if name.startswith("grpc."):
                yield name


def test_every_option_is_one_that_grpc_knows() -> None:
    """It takes any name, and ignores what it doesn't know: a misspelt option would say nothing."""
    library = Path(cygrpc.__file__).read_bytes()
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    named = {name for path in paths for name in options_named(path)}

    assert {name for name, _ in (*SERVER_OPTIONS, *CHANNEL_OPTIONS)} <= named
    # C strings end with a zero byte.
    assert [name for name in sorted(named) if name.encode() + b"\0" not in library] == []


def test_our_clients_ping_no_more_often_than_our_servers_bear() -> None:
    server, client = dict(SERVER_OPTIONS), dict(CHANNEL_OPTIONS)

    assert client["grpc.keepalive_time_ms"] >= 2 * server["grpc.http2.min_ping_interval_without_data_ms"]
    # Else two hours must lie between pings while no call is open.
    assert server["grpc.keepalive_permit_without_calls"] == 1
    # Else pings stop after the second one without data.
    assert client["grpc.http2.max_pings_without_data"] == 0


def hastened(options: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """The same, with keepalive and pings a hundred times as often, and a tenth of the time for an answer."""
    divisors = {"keepalive_time_ms": 100, "ping_interval": 100, "ping_timeout": 10}
    return [
        (name, value // next((divisors[part] for part in divisors if part in name), 1))
        for name, value in options
    ]


async def test_an_idle_stream_stays_open_through_pings(tmp_path: Path) -> None:
    server = grpc.aio.server(options=hastened(SERVER_OPTIONS))
    health = add_health_aio(server)
    address = f"unix:{tmp_path}/s"
    bind(server, address)
    async with AsyncExitStack() as stack:
        await server.start()
        stack.push_async_callback(server.stop, 0)
        channel = grpc.aio.insecure_channel(address, options=hastened(CHANNEL_OPTIONS))
        await stack.enter_async_context(channel)
        call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        await call.read()

        reading = asyncio.ensure_future(call.read())
        # A client pings once a second at most, at once to begin with; the fourth is the end if it's too many.
        assert not (await asyncio.wait([reading], timeout=3.6))[0]

        await health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        assert (await reading).status == health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.mark.parametrize("end", ["client", "server"])
async def test_a_peer_that_is_gone_without_a_word_is_noticed(end: str) -> None:
    """By whichever end it is that pings; the other one's pings are not hastened, and would take 40 s."""
    server = grpc.aio.server(options=hastened(SERVER_OPTIONS) if end == "server" else SERVER_OPTIONS)
    ended = asyncio.Event()

    async def watch(request: bytes, context: Any) -> None:
        await context.write(b"")
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    handler = grpc.method_handlers_generic_handler("t", {"w": grpc.unary_stream_rpc_method_handler(watch)})
    server.add_generic_rpc_handlers((handler,))
    proxy = TcpProxy(f"127.0.0.1:{bind(server, '127.0.0.1:0')}")
    await proxy.start()
    await server.start()
    options = hastened(CHANNEL_OPTIONS) if end == "client" else CHANNEL_OPTIONS
    async with AsyncExitStack() as stack, asyncio.timeout(20):
        stack.push_async_callback(server.stop, 0)
        stack.push_async_callback(proxy.close)
        channel = grpc.aio.insecure_channel(proxy.address, options=options)
        await stack.enter_async_context(channel)
        call = channel.unary_stream("/t/w", None, None)(b"")
        await call.read()

        proxy.swallow()

        if end == "server":
            await ended.wait()
        else:
            assert await call.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_watch_ends_before_its_server(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = grpc.aio.server(options=SERVER_OPTIONS)
    health = add_health_aio(server)
    address = f"unix:{tmp_path}/s"
    bind(server, address)
    await server.start()
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        await call.read()

        health.close()
        assert await call.code() is grpc.StatusCode.OK
        await server.stop(0)

    assert not caplog.records


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("localhost:50051", ("localhost", 50051)),
        ("[::1]:0", ("::1", 0)),
        ("10.0.0.1:65535", ("10.0.0.1", 65535)),
    ],
)
def test_host_and_port_are_split(address: str, expected: tuple[str, int]) -> None:
    assert split_host_port(address) == expected


@pytest.mark.parametrize(
    "address", ["", "localhost", ":1", "host:", "host:-1", "host:65536", "host:a", "host:²"]
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(AddressError, match="is not HOST:PORT"):
        split_host_port(address)


def test_a_unix_path_that_the_kernel_would_cut_is_refused() -> None:
    check_address("--option", "unix:/tmp/short")

    for path in ("", "/" + "x" * 100):
        with pytest.raises(AddressError, match="1 to 100 bytes"):
            check_address("--option", f"unix:{path}")


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("127.0.0.1:0", "nobody listens on port 0; give 1 to 65535"),
        ("dns:localhost:50053", "only --scheduler-addresses takes dns:; give HOST:PORT"),
    ],
)
def test_what_no_server_can_have_is_no_address_to_connect_to(address: str, problem: str) -> None:
    with pytest.raises(AddressError, match=f"^--option {address}: {problem}$"):
        check_peer("--option", address, "--any-tls-ca-file", insecure=True)


def test_a_port_is_bound_once() -> None:
    servers = [grpc.server(futures.ThreadPoolExecutor(1), options=SERVER_OPTIONS) for _ in range(2)]
    port = bind(servers[0], "127.0.0.1:0")

    with pytest.raises(AddressError, match=f"--option 127.0.0.1:{port}: can't be bound"):
        bind(servers[1], f"127.0.0.1:{port}", option="--option")


def test_a_unix_socket_is_bound(tmp_path: Path) -> None:
    bind(grpc.server(futures.ThreadPoolExecutor(1)), f"unix:{tmp_path}/s")


@pytest.mark.parametrize(("number", "code"), [(3, "INVALID_ARGUMENT"), (0, "UNKNOWN"), (17, "UNKNOWN")])
def test_a_number_that_no_failure_has_is_an_unknown_failure(number: int, code: str) -> None:
    assert failure_code(number).name == code
