"""The shards of one machine: which ranks they are, where they listen, and what they say together."""

import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from common.http import serve_http
from common.rpc import AddressError
from launcher.children import usable_cores
from launcher.preflight import PreflightError
from launcher.ranks import RanksConfig, probes, rank_specs, say


def flags(argv: tuple[str, ...]) -> dict[str, str]:
    return dict(word.removeprefix("--").split("=", 1) for word in argv if "=" in word)


def test_a_machine_runs_its_ranks_on_ports_in_a_row() -> None:
    config = RanksConfig(tensor_parallel_size=4, nnodes=2, node_rank=1, shutdown_grace=7)

    specs = rank_specs(config, ["--model=/model"])

    assert [spec.name for spec in specs] == ["shard-2", "shard-3"]
    assert flags(specs[1].argv) == {
        "model": "/model",
        "tensor-parallel-size": "4",
        "rank": "3",
        "listen-address": "127.0.0.1:50054",
        "metrics-address": "127.0.0.1:9105",
        "shutdown-grace": "7",
    }


def test_a_full_disk_under_the_log_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w", buffering=1) as full:
        monkeypatch.setattr(sys, "stderr", full)

        say("shard-0 ended (exit status 1); restart 1 of 5 in 0.5 s")

        monkeypatch.undo()
        with suppress(OSError):
            full.close()


def test_local_ranks_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    specs = rank_specs(RanksConfig(tensor_parallel_size=4, nnodes=2), [])

    assert [spec.environ["OMP_NUM_THREADS"] for spec in specs] == [str(max(1, usable_cores() // 2))] * 2


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (RanksConfig(tensor_parallel_size=3, nnodes=2), "--nnodes 2 doesn't divide --tensor-parallel-size 3"),
        (RanksConfig(node_rank=1), "--node-rank 1 must be less than --nnodes 1"),
        (RanksConfig(listen_address="nowhere"), "--listen-address 'nowhere'"),
        (RanksConfig(metrics_address="127.0.0.1:65535"), "--metrics-address 127.0.0.1:65535"),
        (RanksConfig(listen_address="127.0.0.1:0"), "--listen-address 127.0.0.1:0"),
    ],
)
def test_what_does_not_go_together_is_refused(config: RanksConfig, message: str) -> None:
    with pytest.raises((PreflightError, AddressError), match=message):
        rank_specs(config, [])


@contextmanager
def process(ready: bool) -> Iterator[str]:
    """Answers each GET as a process's metrics address does."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if ready else 503)
            self.send_header("Content-Length", "0")
            self.end_headers()

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def ask(ranks: dict[str, str], path: str = "/readyz") -> tuple[int, str]:
    port = serve_http("--metrics-address", "127.0.0.1:0", probes(ranks))
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_ranks_are_ready_once_all_are() -> None:
    with process(ready=True) as first, process(ready=True) as second:
        assert ask({"shard-0": first, "shard-1": second}) == (200, "ok\n")


def test_a_rank_that_is_not_ready_is_named() -> None:
    with process(ready=True) as first, process(ready=False) as second:
        assert ask({"shard-0": first, "shard-1": second}) == (503, "not yet: shard-1\n")


def test_a_rank_that_nobody_answers_for_is_named() -> None:
    with process(ready=True) as gone:
        pass

    assert ask({"shard-0": gone}, "/livez") == (503, "not yet: shard-0\n")


def test_other_paths_say_where_to_look() -> None:
    status, body = ask({}, "/metrics")

    assert status == 404
    assert "/metrics is at the ports of the ranks" in body


@pytest.mark.parametrize("option", ["--rank", "--rank=1", "--tensor-parallel-size=4", "--shutdown-grace=5"])
def test_what_ranks_sets_itself_is_refused_after_the_border(option: str) -> None:
    with pytest.raises(PreflightError, match=f"^{option}: leave it out after --"):
        rank_specs(RanksConfig(tensor_parallel_size=2), ["--model=/model", option])
