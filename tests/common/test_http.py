"""The small HTTP server bears many and odd clients."""

import http.client
import socket
from collections.abc import Iterable
from wsgiref.types import StartResponse, WSGIEnvironment

import pytest

from common import http as small_http
from common.rpc import AddressError


def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
    start_response("200 OK", [])
    return [b"here"]


def test_connections_beyond_the_limit_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_http, "MAX_CONNECTIONS", 2)
    port = small_http.serve_http("--an-address", "127.0.0.1:0", app)
    idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(2)]
    waiting = http.client.HTTPConnection("127.0.0.1", port, timeout=0.3)
    waiting.request("GET", "/")
    with pytest.raises(TimeoutError):
        waiting.getresponse()

    for one in idle:
        one.close()

    answered = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    answered.request("GET", "/")
    assert answered.getresponse().read() == b"here"


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1:99999"])
def test_an_address_to_listen_on_that_is_none_is_named(address: str) -> None:
    with pytest.raises(AddressError, match=r"^--http-address .*HOST:PORT"):
        small_http.listen("--http-address", address)


def test_a_port_that_is_listened_on_is_taken() -> None:
    with small_http.listen("--http-address", "127.0.0.1:0") as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"

        with pytest.raises(AddressError, match=rf"^--http-address {address}: already in use"):
            small_http.listen("--http-address", address)
