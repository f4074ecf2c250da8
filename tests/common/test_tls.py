"""Both ends of TLS over real connections: who is let in, and what a change of the files does."""

import logging
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.config import ConfigError
from common.rpc import (
    SERVER_OPTIONS,
    AddressError,
    add_health,
    add_health_aio,
    aio_channel,
    bind,
    channel,
    check_exposure,
    check_listener,
)
from common.tls import ClientTls, ServerTls, client_tls, server_tls
from tests.authority import DAY, Authority, private_bytes, replace
from tests.docs.pages import blocks
from tests.samples import sample

SERVING = health_pb2.HealthCheckResponse.SERVING
REFUSED = grpc.StatusCode.UNAVAILABLE


@pytest.fixture
def ca(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def server_of(ca: Authority, *, mutual: bool = True) -> ServerTls:
    tls = server_tls(*ca.issue("server"), ca.file if mutual else None)
    assert tls
    return tls


def client_of(ca: Authority, issuer: Authority | None = None) -> ClientTls:
    """Trusts `ca`, and shows a certificate of `issuer` if there is one."""
    tls = client_tls("peer-tls", ca.file, *(issuer.issue("client") if issuer else (None, None)))
    assert tls
    return tls


@contextmanager
def serving(tls: ServerTls | None) -> Iterator[str]:
    """A threaded server, as the shard is."""
    server = grpc.server(ThreadPoolExecutor(2), options=SERVER_OPTIONS)
    add_health(server).set("", SERVING)
    port = bind(server, "127.0.0.1:0", tls)
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(0).wait()


@asynccontextmanager
async def serving_aio(tls: ServerTls | None) -> AsyncIterator[str]:
    """The same on asyncio, as scheduler and router are."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    await add_health_aio(server).set("", SERVING)
    port = bind(server, "127.0.0.1:0", tls)
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(0)


def ask(connection: grpc.Channel) -> Any:
    """The server's health, or the code of the failure."""
    stub = health_pb2_grpc.HealthStub(connection)
    try:
        return stub.Check(health_pb2.HealthCheckRequest(), timeout=20).status
    except grpc.RpcError as error:
        return error.code()


def asked_anew(address: str, tls: ClientTls | None) -> Any:
    with channel(address, tls) as connection:
        return ask(connection)


async def asked_anew_aio(address: str, tls: ClientTls | None) -> Any:
    async with aio_channel(address, tls) as connection:
        stub = health_pb2_grpc.HealthStub(connection)
        try:
            return (await stub.Check(health_pb2.HealthCheckRequest(), timeout=20)).status
        except grpc.aio.AioRpcError as error:
            return error.code()


def test_who_shows_a_certificate_of_the_client_ca_is_let_in(ca: Authority, tmp_path: Path) -> None:
    other = Authority(tmp_path, "other")

    with serving(server_of(ca)) as address:
        assert asked_anew(address, client_of(ca, issuer=other)) is REFUSED
        assert asked_anew(address, client_of(ca)) is REFUSED
        assert asked_anew(address, None) is REFUSED
        assert asked_anew(address, client_of(ca, issuer=ca)) == SERVING


async def test_an_asyncio_server_lets_in_the_same(ca: Authority, tmp_path: Path) -> None:
    other = Authority(tmp_path, "other")

    async with serving_aio(server_of(ca)) as address:
        assert await asked_anew_aio(address, client_of(ca, issuer=other)) is REFUSED
        assert await asked_anew_aio(address, client_of(ca)) is REFUSED
        assert await asked_anew_aio(address, None) is REFUSED
        assert await asked_anew_aio(address, client_of(ca, issuer=ca)) == SERVING


def test_a_server_of_another_ca_is_not_talked_to(ca: Authority, tmp_path: Path) -> None:
    with serving(server_of(ca, mutual=False)) as address:
        assert asked_anew(address, client_of(Authority(tmp_path, "other"))) is REFUSED
        assert asked_anew(address, client_of(ca)) == SERVING


def test_a_server_is_known_by_the_name_that_is_given(ca: Authority) -> None:
    tls = ServerTls(*ca.issue("server", host="scheduler.example"), None)

    with serving(tls) as address:
        wrong = client_tls("peer-tls", ca.file, None, None, "shard.example")
        right = client_tls("peer-tls", ca.file, None, None, "scheduler.example")
        assert asked_anew(address, wrong) is REFUSED
        assert asked_anew(address, right) == SERVING


async def test_new_connections_get_the_new_certificate_and_old_ones_go_on(
    ca: Authority, tmp_path: Path
) -> None:
    new = Authority(tmp_path, "new")
    old_client, new_client = client_of(ca), client_of(new)

    async with (
        serving_aio(server_of(ca, mutual=False)) as address,
        aio_channel(address, old_client) as living,
    ):
        stub = health_pb2_grpc.HealthStub(living)
        await stub.Check(health_pb2.HealthCheckRequest())
        new.issue("server")

        assert await asked_anew_aio(address, new_client) == SERVING
        assert await asked_anew_aio(address, old_client) is REFUSED
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status == SERVING


def test_the_client_ca_is_read_anew(ca: Authority, tmp_path: Path) -> None:
    new = Authority(tmp_path, "new")

    with serving(server_of(ca)) as address:
        assert asked_anew(address, client_of(ca, issuer=new)) is REFUSED
        replace(ca.file, ca.file.read_bytes() + new.file.read_bytes())
        assert asked_anew(address, client_of(ca, issuer=new)) == SERVING


def test_a_client_shows_its_new_certificate_on_its_next_channel(ca: Authority, tmp_path: Path) -> None:
    other = Authority(tmp_path, "other")

    with serving(server_of(ca)) as address:
        tls = client_of(ca, issuer=other)
        assert asked_anew(address, tls) is REFUSED
        ca.issue("client")
        assert asked_anew(address, tls) == SERVING


@pytest.mark.parametrize("content", [b"", b"not a certificate", None], ids=["empty", "broken", "gone"])
def test_a_broken_file_keeps_the_old_certificate_and_is_logged_once(
    ca: Authority, caplog: pytest.LogCaptureFixture, content: bytes | None
) -> None:
    tls = server_of(ca, mutual=False)
    client = client_of(ca)
    file = ca.issue("server").certificate

    with serving(tls) as address:
        assert asked_anew(address, client) == SERVING
        if content is None:
            file.unlink()
        else:
            replace(file, content)
        for _ in range(2):
            assert asked_anew(address, client) == SERVING
        (error,) = [record for record in caplog.records if record.levelno == logging.ERROR]
        assert f"--tls-cert-file {file}: " in error.message

        ca.issue("server")
        assert asked_anew(address, client) == SERVING


def test_a_new_certificate_waits_for_its_key(ca: Authority, tmp_path: Path) -> None:
    tls = server_of(ca, mutual=False)
    apart = tmp_path / "apart"
    apart.mkdir()
    new = Authority(apart)
    pair = new.issue("server")

    with serving(tls) as address:
        replace(tmp_path / "server.pem", pair.certificate.read_bytes())
        assert asked_anew(address, client_of(ca)) == SERVING
        replace(tmp_path / "server.key", pair.key.read_bytes())
        assert asked_anew(address, client_of(new)) == SERVING


@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl")
def test_monitoring_sees_a_certificate_expire_without_a_connection(ca: Authority) -> None:
    def days_left() -> int:
        expiry = sample("pagoda_certificate_expiry_timestamp_seconds", files="tls")
        return round((expiry - time.time()) / DAY.total_seconds())

    tls = server_of(ca)
    assert days_left() == 1

    ca.issue("server", days=3)

    assert days_left() == 3
    del tls


def test_the_certificates_of_the_documentation_work(tmp_path: Path) -> None:
    (script,) = [block for block in blocks("docs/security.md", "sh") if "openssl" in block]
    subprocess.run(["bash", "-ec", script], cwd=tmp_path, check=True, capture_output=True, timeout=60)
    ca = tmp_path / "ca.pem"
    server = server_tls(tmp_path / "scheduler.pem", tmp_path / "scheduler.key", ca)
    client = client_tls("peer-tls", ca, tmp_path / "router.pem", tmp_path / "router.key", "scheduler.example")

    with serving(server) as address:
        assert asked_anew(address, client) == SERVING


# For HTTP.


@contextmanager
def greeting(context: ssl.SSLContext) -> Iterator[int]:
    """A server of Python's own that says hello to whom it lets in."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(20)

    def serve() -> None:
        while True:
            try:
                plain, _ = listener.accept()
            except OSError:
                return
            try:
                with context.wrap_socket(plain, server_side=True) as connection:
                    connection.sendall(b"hello")
            except OSError:
                plain.close()

    thread = threading.Thread(target=serve)
    thread.start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


def greeted(port: int, ca: Authority, issuer: Authority | None = None) -> bytes:
    context = ssl.create_default_context(cafile=ca.file)
    if issuer:
        context.load_cert_chain(*issuer.issue("client"))
    try:
        with (
            socket.create_connection(("127.0.0.1", port), timeout=20) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
        ):
            return connection.recv(5)
    except ssl.SSLError:
        return b""


def test_a_context_of_python_gives_new_connections_the_new_certificate(ca: Authority, tmp_path: Path) -> None:
    new = Authority(tmp_path, "new")

    with greeting(server_of(ca, mutual=False).ssl_context()) as port:
        assert (greeted(port, ca), greeted(port, new)) == (b"hello", b"")
        new.issue("server")
        assert (greeted(port, ca), greeted(port, new)) == (b"", b"hello")


def test_a_context_of_python_asks_for_certificates_of_the_client_ca_as_it_is_now(
    ca: Authority, tmp_path: Path
) -> None:
    new = Authority(tmp_path, "new")
    context = server_of(ca).ssl_context()
    trusted = ca.file.read_bytes()

    with greeting(context) as port:
        assert greeted(port, ca) == b""
        assert (greeted(port, ca, ca), greeted(port, ca, new)) == (b"hello", b"")
        replace(ca.file, new.file.read_bytes())
        replace(tmp_path / "trusted.pem", trusted)
        ca.file = tmp_path / "trusted.pem"
        assert (greeted(port, ca, ca), greeted(port, ca, new)) == (b"", b"hello")


# Settings.


def test_files_that_do_not_go_together_are_named(ca: Authority) -> None:
    pair, other = ca.issue("server"), ca.issue("other")

    for certificate, key, client_ca, message in (
        (pair.certificate, None, None, "--tls-cert-file needs --tls-key-file"),
        (None, pair.key, None, "--tls-key-file needs --tls-cert-file"),
        (None, None, ca.file, "--tls-client-ca-file needs --tls-cert-file and --tls-key-file"),
        (pair.certificate, other.key, None, f"--tls-key-file {other.key}: not the unencrypted PEM key"),
        (pair.key, pair.key, None, f"--tls-cert-file {pair.key}: holds no PEM certificates"),
        (*pair, pair.key, f"--tls-client-ca-file {pair.key}: holds no PEM certificates"),
        (Path("/nowhere"), pair.key, None, "--tls-cert-file /nowhere: No such file"),
    ):
        with pytest.raises(ConfigError, match=message):
            server_tls(certificate, key, client_ca)
    for certificate, key, name, message in (
        (pair.certificate, None, None, "--peer-tls-cert-file needs --peer-tls-ca-file"),
        (None, None, "name", "--peer-tls-server-name needs --peer-tls-ca-file"),
    ):
        with pytest.raises(ConfigError, match=message):
            client_tls("peer-tls", None, certificate, key, name)


def test_an_encrypted_key_is_refused_without_asking_for_its_password(ca: Authority) -> None:
    pair = ca.issue("server")
    replace(pair.key, private_bytes(ec.generate_private_key(ec.SECP256R1()), b"password"))

    with pytest.raises(ConfigError, match="not the unencrypted PEM key"):
        server_tls(*pair, None)


@pytest.mark.parametrize(
    "address", ["unix:/tmp/s", "127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "localhost:1", "localhost:0"]
)
def test_this_machine_needs_no_tls(address: str) -> None:
    check_listener(address, None, insecure=False)


@pytest.mark.parametrize("address", ["0.0.0.0:1", "[::]:1", "10.0.0.1:1", "example:1", "unix-abstract:a:1"])
def test_addresses_beyond_this_machine_need_mutual_tls_or_insecure(
    address: str, ca: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    for tls in (None, server_of(ca, mutual=False)):
        with pytest.raises(AddressError, match=r"--listen-address .*--tls-client-ca-file, or --insecure"):
            check_listener(address, tls, insecure=False)
    check_listener(address, server_of(ca), insecure=False)
    assert not caplog.records

    check_exposure("--listen-address", address, "--anything", insecure=True)
    assert f"{address} is beyond this machine, without --anything" in caplog.text
