"""A real Prometheus watches a real stack under load; every query of the dashboards finds data."""

import json
import math
import re
import signal
import urllib.parse
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from pagoda.v1 import inference_pb2 as pb
from router.auth import digest
from tests.e2e.client import spec, status
from tests.e2e.stack import ROOT, Stack, launched, until
from tests.tools import find_tool

pytestmark = pytest.mark.e2e

KEYS = {"acme": "pgd-acme", "umbrella": "pgd-umbrella"}
DASHBOARDS = sorted((ROOT / "k8s/dashboards").glob("*.json"))


@dataclass(frozen=True)
class Monitored:
    """A stack and the address of the Prometheus that its launcher started."""

    stack: Stack
    prometheus: str

    def ask(self, path: str, **parameters: str) -> Any:
        """What Prometheus's HTTP API has for data."""
        url = f"{self.prometheus}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=10) as response:
            return json.load(response)["data"]

    def values(self, query: str) -> list[float]:
        """The numbers that a query finds now."""
        found = self.ask("query", query=query)["result"]
        return [number for one in found if not math.isnan(number := float(one["value"][1]))]


def generate(stack: Stack, key: str, request: pb.GenerateSpec) -> pb.GenerateResponse:
    with stack.channel() as channel:
        metadata = (("authorization", f"Bearer {key}"),)
        return stack.stub(channel).Generate(pb.GenerateRequest(spec=request), timeout=60, metadata=metadata)


def work(stack: Stack) -> None:
    """Requests of two tenants that share, fork, wait and are preempted, and some that fail."""
    requests = []
    for number in range(8):
        request = spec("a shared beginning " * 4 + str(number), 60, temperature=1, ignore_eos=True)
        request.n = 2
        requests.append((list(KEYS.values())[number % 2], request))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda one: generate(stack, *one), requests))
    assert status(lambda: generate(stack, "wrong", spec()))[0] is grpc.StatusCode.UNAUTHENTICATED
    assert status(lambda: generate(stack, KEYS["acme"], spec("", 1)))[0] is grpc.StatusCode.INVALID_ARGUMENT


@pytest.fixture(scope="module")
def monitored(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Monitored]:
    find_tool("prometheus", "prometheus")
    keys = tmp_path_factory.mktemp("keys") / "keys.yaml"
    keys.write_text(json.dumps([{"id": name, "key_sha256": digest(key)} for name, key in KEYS.items()]))
    keys.chmod(0o600)
    flags = ("--block-size=4", "--num-gpu-blocks-override=100", "--swap-space=0.01", "--max-num-seqs=8")
    with launched(
        f"--model={tiny_model_folder}", f"--api-keys-file={keys}", "--prometheus-address=127.0.0.1:0", *flags
    ) as stack:
        stack.wait_ready()
        (address,) = re.findall(r"monitor +(http://\S+)/ +\(prometheus\)", "\n".join(stack.lines))
        yield Monitored(stack, address)


def answers(monitored: Monitored, query: str) -> bool:
    try:
        return bool(monitored.values(query))
    except OSError:
        return False


@pytest.fixture(scope="module")
def under_load(monitored: Monitored) -> Monitored:
    """Scraped before the load, and after enough of it that rates are there."""
    until(lambda: answers(monitored, 'up{job="pagoda-router"} == 1'))
    for _ in range(3):
        work(monitored.stack)
        done = monitored.stack.metric("router", "pagoda_router_tenant_requests_total")
        seen = f"sum(pagoda_router_tenant_requests_total) >= {done}"
        until(lambda seen=seen: answers(monitored, seen))  # type: ignore[misc]
    # Of recorded series, rules are evaluated after the scrape.
    until(lambda: answers(monitored, "pagoda:ttft_slow:ratio_rate5m"))
    return monitored


def queries(dashboard: Path) -> list[str]:
    panels = json.loads(dashboard.read_text())["panels"]
    found = [target["expr"] for panel in panels for target in panel["targets"]]
    return [one.replace("$__rate_interval", "5m").replace("$namespace", ".*") for one in found]


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda path: path.stem)
def test_every_query_of_a_dashboard_finds_data(under_load: Monitored, dashboard: Path) -> None:
    assert {query for query in queries(dashboard) if not under_load.values(query)} == set()


def test_each_process_is_watched(under_load: Monitored) -> None:
    targets = under_load.ask("targets")["activeTargets"]

    assert {(one["labels"]["job"], one["health"]) for one in targets} == {
        (f"pagoda-{name}", "up") for name in ("router", "scheduler", "shard")
    }


def test_the_rules_are_loaded_and_evaluated(under_load: Monitored) -> None:
    rules = [rule for group in under_load.ask("rules")["groups"] for rule in group["rules"]]

    assert len(rules) > 15
    until(lambda: all(rule["health"] == "ok" for rule in rules_of(under_load)))
    assert not [rule for rule in rules if rule.get("state") == "firing"]


def rules_of(monitored: Monitored) -> list[Any]:
    return [rule for group in monitored.ask("rules")["groups"] for rule in group["rules"]]


def test_the_load_left_its_traces(under_load: Monitored) -> None:
    """So that no query finds zeros alone."""
    for query in (
        "pagoda_kv_block_copies_total",
        "pagoda_kv_block_evictions_total",
        "pagoda_prefix_cache_hit_tokens_total",
        "sum(pagoda_scheduler_preemptions_total)",
        'pagoda_kv_swapped_bytes_total{direction="out"}',
        "pagoda_scheduler_queue_seconds_count",
        'pagoda_scheduler_step_phase_seconds_sum{phase="wire"}',
        'pagoda_router_tenant_tokens_total{tenant="acme", kind="output"}',
        'pagoda_router_errors_total{reason="INVALID_API_KEY"}',
    ):
        assert max(under_load.values(query)) > 0, query


def test_prometheus_ends_with_its_launcher_however_that_ends(tiny_model_folder: Path) -> None:
    find_tool("prometheus", "prometheus")
    with launched(f"--model={tiny_model_folder}", "--prometheus-address=127.0.0.1:0") as stack:
        stack.wait_line("monitor")
        family = psutil.Process(stack.process.pid).children(recursive=True)
        assert "prometheus" in {one.name() for one in family}

        stack.process.send_signal(signal.SIGKILL)

        _, alive = psutil.wait_procs(family, timeout=20)
        assert not alive
