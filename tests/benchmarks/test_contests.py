"""The benchmarks against others: they run small and print the lines they promise."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import document, gpu, http, kernels, latency, peers, results, router, serving, throughput
from benchmarks.contest import contest
from benchmarks.matmul_limit import LimitContender
from benchmarks.random_model import random_model
from benchmarks.workload import Answer, Run, Work, make, single
from tests.docs.pages import PAGES

Capture = pytest.CaptureFixture[str]


TINY = ["--quick", "--rounds=1", "--model-shape=tiny", "--dtype=float32"]


FIELDS = {"benchmark", "name", "unit", "ours", "peer", "against", "ratio", "limit_fraction"}


def lines(capsys: Capture) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all(set(line) >= FIELDS for line in found)
    return found


def test_ratios_say_how_much_better_ours_is() -> None:
    faster = results.comparison("rate", "tok/s", [30, 10, 20], [5.0], "other", limit=40)
    sooner = results.comparison("time", "s", [2.0], [5.0], "other", limit=1, lower_is_better=True)
    alone = results.comparison("rate", "tok/s", [20])

    assert (faster["ours"], faster["ratio"], faster["limit_fraction"]) == (20, 4, 0.5)
    assert (sooner["ratio"], sooner["limit_fraction"]) == (2.5, 0.5)
    assert (alone["peer"], alone["ratio"], alone["limit_fraction"]) == (None, None, None)


def test_goodput_counts_what_kept_both_bounds() -> None:
    answers = (Answer(11, 0.5, 1.0), Answer(11, 2.0, 2.5), Answer(11, 0.5, 5.5))

    assert serving.goodput(Run(2.0, 33, answers), ttft_bound_s=1.0, itl_bound_s=0.1) == 0.5


def test_percentiles_are_values_that_occurred() -> None:
    values = [float(value) for value in range(1, 51)]

    assert serving.percentile(values, 50) == 25
    assert serving.percentile(values, 99) == 50


def test_four_bit_weights_are_compared_with_four_bit_weights() -> None:
    def run(seconds: float) -> list[Run]:
        return [Run(seconds, 11, (Answer(11, 0.0, seconds),))]

    runs = {latency.OURS: run(2.0), latency.LIMIT: run(1.0), "vllm-cpu": run(4.0), "llama-cpp": run(1.0)}
    runs[latency.QUANTIZED] = run(0.5)

    rate, _, _, four_bit, _, between = latency.lines(runs, ["vllm-cpu", "llama-cpp"])

    assert (rate["ratio"], rate["limit_fraction"]) == (2, 0.5)
    assert (four_bit["name"], four_bit["ratio"]) == ("pagoda 4-bit against llama-cpp", 2)
    assert (between["ours"], between["limit_fraction"]) == (0.05, None)


def test_the_time_between_tokens_has_a_limit_without_the_prompt() -> None:
    def run(ttft_s: float, end_s: float) -> list[Run]:
        return [Run(end_s, 11, (Answer(11, ttft_s, end_s),))]

    runs = {latency.OURS: run(4.0, 6.0), latency.LIMIT: run(3.0, 4.0)}

    rate, first, between = latency.lines(runs, [])

    assert rate["limit_fraction"] == pytest.approx(4 / 6, abs=1e-3)
    assert (first["limit_fraction"], between["limit_fraction"]) == (0.75, 0.5)


def test_the_limit_of_a_request_alone_is_timed_as_its_client_would() -> None:
    limit = LimitContender(random_model("tiny", "float32"), 512, "float32", "cpu")

    run = limit.run(single(512, prompt=600, output=3))

    [answer] = run.answers
    assert answer.tokens == 3
    assert 0 < answer.ttft_s < answer.end_s == run.seconds


class Scripted:
    """Takes a given time for each run."""

    def __init__(self, name: str, log: list[str]) -> None:
        self._name, self._log = name, log

    def run(self, work: Work) -> Run:
        self._log.append(f"{self._name} {len(work)}")
        return Run(1.0, len(work))

    def close(self) -> None:
        self._log.append(f"{self._name} closed")


@pytest.mark.parametrize(
    ("one_at_a_time", "order"),
    [
        (False, ["a 1", "b 1", "a 2", "b 2", "a 3", "b 3", "b closed", "a closed"]),
        (True, ["a 1", "a 2", "a 3", "a closed", "b 1", "b 2", "b 3", "b closed"]),
    ],
)
def test_contenders_take_turns(one_at_a_time: bool, order: list[str]) -> None:
    log: list[str] = []
    work = [make([(1, 1)] * count, 512) for count in (2, 3)]

    runs = contest(
        {name: lambda name=name: Scripted(name, log) for name in "ab"},  # type: ignore[misc]
        work,
        make([(1, 1)], 512),
        one_at_a_time,
        settle_s=0,
    )

    assert log == order
    assert [run.tokens for run in runs["a"]] == [2, 3]


def test_throughput_through_grpc_and_through_the_shard_alone(tmp_path: Path, capsys: Capture) -> None:
    throughput.main([*TINY, f"--output={tmp_path}", "--peers"])

    found = lines(capsys)
    assert [line["name"] for line in found] == [
        "gRPC path against shard alone",
        "gRPC streams against shard alone",
        "shard alone against matmul limit",
    ]
    assert all(line["ours"] > 0 and line["ratio"] > 0 and line["limit_fraction"] > 0 for line in found)
    (kept,) = tmp_path.glob("throughput-????-??-??.jsonl")
    head, *again = [json.loads(line) for line in kept.read_text().splitlines()]
    assert again == found
    assert {"date", "commit", "hardware", "torch", "flags"} <= set(head)
    assert document.newest("throughput", tmp_path) is None, "a quick run is no result"


def test_the_router_is_measured_over_both_of_its_faces(capsys: Capture) -> None:
    router.main([*TINY])

    found = lines(capsys)
    here = [
        "4 streams, gRPC",
        "time to first token beside 3 streams, gRPC",
        "4 streams, HTTP",
        "time to first token beside 3 streams, HTTP",
    ]
    assert [line["name"] for line in found] == here + [f"{name}, model elsewhere" for name in here]
    assert all(line["ours"] > 0 and line["against"] == "scheduler" for line in found)


def test_the_router_is_not_measured_without_its_shard(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("PAGODA_SHARD_KV_CACHE_MEMORY_BYTES", "much")
    with pytest.raises(SystemExit):
        router.main([*TINY])

    assert "router-shard ended with status 2" in capsys.readouterr().err


GENERATOR = """
import json, urllib.request
def load(options):
    def run(message):
        flags = dict(zip(message["flags"][::2], message["flags"][1::2]))
        count = int(flags["--num-prompts"])
        body = {"model": options["served_model_name"], "prompt": [5, 6], "max_tokens": 1}
        for _ in range(count):
            url = flags["--base-url"] + "/v1/completions"
            request = urllib.request.Request(url, json.dumps(body).encode())
            request.add_header("Content-Type", "application/json")
            urllib.request.urlopen(request).close()
        times = {"median_ttft_ms": 20.0, "p99_ttft_ms": 30.0, "median_tpot_ms": 5.0}
        failed = options["failed"]
        return {"completed": count - failed, "failed": failed, "output_throughput": 100.0, **times}
    return run
"""


@pytest.fixture
def generator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A load generator that asks really; its options."""
    options: dict[str, Any] = {"failed": 0}
    (tmp_path / "scripted.py").write_text(GENERATOR)
    recipe = peers.Recipe(str(tmp_path / "scripted"), (), options=options)
    monkeypatch.setitem(peers.PEERS, http.GENERATOR, recipe)
    monkeypatch.setattr(peers, "install", lambda name: Path(sys.executable))
    return options


def test_the_load_generator_asks_our_server_over_http(generator: dict[str, Any], capsys: Capture) -> None:
    http.main([*TINY, "--peers"])

    found = lines(capsys)
    assert [(line["unit"], line["ours"]) for line in found] == [
        ("output tok/s", 100.0),
        ("s", 0.02),
        ("s", 0.03),
        ("s", 0.005),
    ]


def test_requests_that_fail_end_the_benchmark(generator: dict[str, Any], capsys: Capture) -> None:
    generator["failed"] = 1

    with pytest.raises(SystemExit):
        http.main([*TINY, "--peers"])

    assert "1 of 4 requests to 127.0.0.1" in capsys.readouterr().err


@pytest.mark.parametrize("work", ["offline", "long-tailed"])
def test_the_shard_alone_needs_no_server(work: str, capsys: Capture) -> None:
    throughput.main([*TINY, "--no-server", f"--workload={work}", "--peers"])

    (line,) = lines(capsys)
    assert line["name"] == "shard alone against matmul limit"


@pytest.mark.parametrize("only", ["attention", "layers", "logits"])
def test_kernels_are_right_and_timed(only: str, capsys: Capture) -> None:
    kernels.main([*TINY, f"--only={only}"])

    found = lines(capsys)
    assert len(found) > 1
    assert all(line["max_error"] < 1e-4 and line["bound"] in ("copy", "gemm") for line in found)


def test_a_wrong_kernel_ends_the_benchmark(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr("kernels.rms_norm", lambda x, weight, eps: x)

    with pytest.raises(SystemExit, match="1"):
        kernels.main([*TINY, "--only=rms_norm, 64"])

    assert "rms_norm, 64 tokens is off by" in capsys.readouterr().err


def test_the_gpu_command_runs_on_a_cpu(capsys: Capture) -> None:
    flags = ["--quick", "--device=cpu", "--shapes", "tiny", "--dtype=float32", "--no-server", "--peers"]

    gpu.main(flags)

    names = [line["name"] for line in lines(capsys)]
    assert names[0] == "10 layers, 1 decode at 256 tokens"
    assert names[-1] == "shard alone against matmul limit"


def test_the_page_has_the_results_that_are_kept() -> None:
    text = PAGES["docs/performance.md"].read_text()

    assert document.places(text) == ["plot", *document.NAMES]
    assert text == document.generated(text), "run `python -m benchmarks.document`"


def test_a_table_has_a_row_per_comparison(tmp_path: Path) -> None:
    head = {"date": "2026-01-02", "commit": "abc", "python": "3", "torch": "2", "flags": {}}
    hardware = {"cpu": "CPU", "cores": 2, "memory_gib": 23.4}
    row = results.comparison("this against that", "tok/s", [1234.0], [617.0], "that", 2468.0)
    kept = [json.dumps({**head, "hardware": hardware}), json.dumps(row)]
    (tmp_path / "throughput-2026-01-02.jsonl").write_text("\n".join(kept))

    said, _, *table = document.table(document.newest("throughput", tmp_path)).splitlines()

    assert said == "2026-01-02, commit `abc`, 2 cores of CPU, 23 GiB; Python 3, torch 2."
    assert table[2:] == ["| this against that | 1,234 tok/s | 617 tok/s | 2.00 | 50 % |"]
    assert document.ratios(tmp_path) == [("this against that", 2.0)]
