"""Probes answer for this process alone."""

import http.client
from collections.abc import Callable

import pytest

from common.probes import Probes, serve_probes
from common.rpc import AddressError

Get = Callable[..., tuple[int, str]]


@pytest.fixture
def probes() -> Probes:
    return Probes(stall_limit_s=1000)


@pytest.fixture
def get(probes: Probes) -> Get:
    port = serve_probes("127.0.0.1:0", probes)

    def get(path: str, method: str = "GET") -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, response.read().decode()

    return get


def test_started_and_ready_are_told_apart(probes: Probes, get: Get) -> None:
    assert get("/startupz") == get("/readyz") == (503, "not yet\n")

    probes.started = True
    assert get("/startupz") == (200, "ok\n")
    assert get("/readyz")[0] == 503

    probes.ready = True
    assert get("/readyz")[0] == 200


def test_alive_until_the_loop_stalls(get: Get) -> None:
    stalled = Probes(stall_limit_s=0)

    assert get("/livez")[0] == 200
    assert not stalled.alive


def test_metrics_are_prometheus_text(get: Get) -> None:
    status, body = get("/metrics")

    assert status == 200
    assert "# TYPE python_info gauge" in body


def test_other_paths_say_what_there_is(get: Get) -> None:
    assert get("/") == (404, "try /metrics, /startupz, /livez or /readyz\n")


@pytest.mark.parametrize("path", ["/metrics", "/livez", "/"])
def test_nothing_can_be_posted(get: Get, path: str) -> None:
    assert get(path, "POST") == (405, "")
    assert get(path, "HEAD")[0] == get(path)[0]


def test_a_port_in_use_is_refused(probes: Probes) -> None:
    port = serve_probes("127.0.0.1:0", probes)

    with pytest.raises(AddressError, match=f"127.0.0.1:{port}: already in use"):
        serve_probes(f"127.0.0.1:{port}", probes)
