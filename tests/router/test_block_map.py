"""The block map over HTTP, against schedulers that have nothing but maps."""

import http.client
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from common.rpc import AddressError
from common.tls import ClientTls, client_tls, server_tls
from pagoda.scheduler.v1 import scheduler_pb2 as pb
from router import block_map
from router.block_map import serve_block_map
from router.config import RouterConfig
from tests.authority import Authority
from tests.router.fake_block_maps import FakeBlockMaps

HOSTILE = "<img src=x onerror=alert(1)>"
MAP = pb.GetBlockMapResponse(
    block_size=16,
    num_blocks=4,
    num_host_blocks=2,
    ref_counts=[2, 1, 0, 0],
    cached=[True, False, True, False],
    sequences=[
        pb.BlockMapSequence(
            request_id=HOSTILE,
            output_index=1,
            state=pb.SEQUENCE_STATE_RUNNING,
            block_ids=[0, 1],
            num_tokens=20,
            num_computed_tokens=19,
        ),
        pb.BlockMapSequence(request_id="later", state=pb.SEQUENCE_STATE_SWAPPED, block_ids=[1], num_tokens=7),
    ],
    preemptions=1,
    copies=2,
    evictions=2**40,
    step=3,
)
OTHER_MAP = pb.GetBlockMapResponse(block_size=8, num_blocks=1, ref_counts=[0], cached=[False])


class Page:
    """A client of the page's server."""

    def __init__(self, schedulers: list[str], tls: ClientTls | None = None) -> None:
        self.port = serve_block_map("127.0.0.1:0", schedulers, tls)

    def request(
        self, path: str, method: str = "GET", host: str | None = None
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        connection.request(method, path, headers={"Host": host} if host is not None else {})
        response = connection.getresponse()
        return response.status, response.headers, response.read()

    def json(self, path: str) -> Any:
        status, headers, body = self.request(path)
        assert headers["Content-Type"] == "application/json"
        value = json.loads(body)
        assert value.get("error", {"status": 200})["status"] == status
        return value


@pytest.fixture
def schedulers() -> Iterator[list[FakeBlockMaps]]:
    with ExitStack() as stack:
        yield [stack.enter_context(FakeBlockMaps(one).serving()) for one in (MAP, OTHER_MAP)]


@pytest.fixture
def page(schedulers: list[FakeBlockMaps]) -> Page:
    return Page([one.address for one in schedulers])


def test_a_map_is_what_the_scheduler_says(page: Page) -> None:
    assert page.json("/api/map") == {
        "block_size": 16,
        "num_blocks": 4,
        "num_host_blocks": 2,
        "ref_counts": [2, 1, 0, 0],
        "cached": [0, 2],
        "sequences": [
            {
                "request_id": HOSTILE,
                "output_index": 1,
                "state": "running",
                "block_ids": [0, 1],
                "num_tokens": 20,
                "num_computed_tokens": 19,
            },
            {
                "request_id": "later",
                "output_index": 0,
                "state": "swapped",
                "block_ids": [1],
                "num_tokens": 7,
                "num_computed_tokens": 0,
            },
        ],
        "preemptions": 1,
        "copies": 2,
        "evictions": 2**40,
        "step": 3,
    }


def test_a_scheduler_is_chosen_by_number(page: Page, schedulers: list[FakeBlockMaps]) -> None:
    assert page.json("/api/schedulers") == {"schedulers": [one.address for one in schedulers]}
    assert page.json("/api/map?scheduler=0") == page.json("/api/map")
    assert page.json("/api/map?scheduler=1")["block_size"] == 8


@pytest.mark.parametrize("number", ["2", "-1", "1.0", "x", "01", "%D9%A1", "9" * 5000])
def test_a_number_that_no_scheduler_has_is_refused(page: Page, number: str) -> None:
    error = page.json(f"/api/map?scheduler={number}")["error"]

    assert error["status"] == 400
    assert error["message"].startswith("scheduler: ")
    assert error["message"].endswith("is not from 0 to 1")
    assert len(error["message"]) < 100


def test_any_number_of_viewers_costs_one_call(page: Page, schedulers: list[FakeBlockMaps]) -> None:
    schedulers[0].may_answer.clear()
    with ThreadPoolExecutor(8) as viewers:
        answers = [viewers.submit(page.json, "/api/map") for _ in range(8)]
        schedulers[0].may_answer.set()

    assert all(answer.result()["step"] == 3 for answer in answers)
    assert schedulers[0].calls == 1


def test_a_scheduler_that_is_away_is_503() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"

    error = Page([address]).json("/api/map")["error"]

    assert error["status"] == 503
    assert error["message"].startswith("UNAVAILABLE: ")


def test_a_scheduler_that_hangs_is_504(
    page: Page, schedulers: list[FakeBlockMaps], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_map, "RPC_TIMEOUT_S", 0.1)
    schedulers[0].may_answer.clear()

    assert page.json("/api/map")["error"]["status"] == 504
    assert page.json("/api/map?scheduler=1")["block_size"] == 8


@pytest.mark.parametrize(
    ("path", "content_type"),
    [
        ("/", "text/html; charset=utf-8"),
        ("/page.js", "text/javascript; charset=utf-8"),
        ("/grid.js", "text/javascript; charset=utf-8"),
        ("/base.css", "text/css; charset=utf-8"),
        ("/style.css", "text/css; charset=utf-8"),
        ("/icon.svg", "image/svg+xml"),
        ("/api/map", "application/json"),
        ("/nowhere", "application/json"),
    ],
)
def test_every_answer_is_fenced(page: Page, path: str, content_type: str) -> None:
    _, headers, body = page.request(path)
    policy = headers["Content-Security-Policy"].split("; ")

    assert headers["Content-Type"] == content_type
    assert headers["Content-Length"] == str(len(body))
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cache-Control"] == "no-store"
    assert {"default-src 'self'", "frame-ancestors 'none'", "trusted-types 'none'"} <= set(policy)
    assert not any("unsafe" in directive for directive in policy)
    assert "Access-Control-Allow-Origin" not in headers


@pytest.mark.parametrize(
    "path",
    [
        "/index.html",
        "/../block_map.py",
        "/..%2f..%2fblock_map.py",
        "/%2e%2e/%2e%2e/config.py",
        "/./page.js",
        "/page.js/",
        "/page.js%00.css",
        "/%ff",
        "/api",
        "/api/map/",
        "//etc/passwd",
        "/" + "a" * 5000,
    ],
)
def test_other_paths_are_404(page: Page, path: str) -> None:
    assert page.json(path)["error"] == {
        "status": 404,
        "message": "no such path; try /, /api/schedulers or /api/map",
    }


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE", "BREW"])
def test_only_reading_is_served(page: Page, method: str) -> None:
    status, headers, _ = page.request("/api/map", method)

    assert status == 405
    assert headers["Allow"] == "GET, HEAD"


@pytest.mark.parametrize("path", ["/", "/api/map", "/nowhere"])
def test_head_is_get_without_the_body(page: Page, path: str) -> None:
    status, headers, body = page.request(path)
    head_status, head_headers, head_body = page.request(path, "HEAD")

    assert (head_status, head_headers["Content-Length"], head_body) == (status, str(len(body)), b"")
    assert headers["Content-Length"] == head_headers["Content-Length"]


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:9", 200),
        ("[::1]:9", 200),
        ("[::1]", 200),
        ("localhost", 200),
        ("LOCALHOST:9", 200),
        ("rebound.example:9", 403),
        ("localhost.example", 403),
        ("", 403),
    ],
)
def test_a_name_that_others_can_point_here_is_refused(page: Page, host: str, status: int) -> None:
    assert page.request("/api/map", host=host)[0] == status


def test_garbage_and_clients_that_go_away_change_nothing(
    page: Page, capfd: pytest.CaptureFixture[str]
) -> None:
    for garbage in (b"\0\xff\r\n\r\n", b"GET", b"GET / HTTP/1.1\r\n", b"GET / HTTP/9\r\n\r\n", b""):
        with socket.create_connection(("127.0.0.1", page.port)) as client:
            client.sendall(garbage)

    assert page.request("/")[0] == 200
    assert "Traceback" not in capfd.readouterr().err


def test_it_is_off_by_default() -> None:
    assert RouterConfig(model="", scheduler_addresses=()).block_map_address is None


@pytest.mark.parametrize("address", ["nowhere", "unix:/tmp/map", "127.0.0.1:99999"])
def test_an_address_that_is_none_is_named(address: str) -> None:
    with pytest.raises(AddressError, match=r"^--block-map-address .*HOST:PORT"):
        serve_block_map(address, [])


def test_a_port_in_use_is_one_line_and_status_2(model_folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        free = [f"--{one}-address=127.0.0.1:0" for one in ("listen", "http", "metrics")]
        scheduler = "--scheduler-addresses=127.0.0.1:1"
        command = [sys.executable, "-m", "router", f"--model={model_folder}", scheduler]
        done = subprocess.run(
            [*command, *free, f"--block-map-address={address}"], capture_output=True, text=True, timeout=30
        )

    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        f"python -m router: --block-map-address {address}: already in use"
    )


def test_the_map_comes_over_tls_once_the_certificate_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_map, "MAX_AGE_S", 0)
    ca = Authority(tmp_path)
    stranger = Authority(tmp_path, "stranger").issue("router")
    with FakeBlockMaps(MAP).serving(server_tls(*ca.issue("scheduler"), ca.file)) as scheduler:
        page = Page([scheduler.address], client_tls("scheduler-tls", ca.file, *stranger))
        assert page.json("/api/map")["error"]["status"] == 503

        ca.issue("router")

        assert page.json("/api/map")["num_blocks"] == 4
