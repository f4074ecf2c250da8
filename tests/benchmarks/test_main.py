"""Each benchmark runs, small, and prints the lines that it promises."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import faults, kv_waste, replicas, scheduler, simulate, soak

Capture = pytest.CaptureFixture[str]

# A pool that stays full for most of the run.
FULL = ["--num-blocks=300", "--requests=400"]


def lines(capsys: Capture) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_waste_stays_within_its_limits(capsys: Capture) -> None:
    kv_waste.main(FULL)

    chat, short = lines(capsys)
    assert (chat["trace"], short["trace"]) == ("sharegpt-like", "alpaca-like")
    assert chat["mean_used_ratio"] > 0.7
    assert 0 < chat["waste_ratio"] < 0.04
    assert short["waste_ratio"] <= 1.15 * short["floor_ratio"]
    # Less would be wrong: half a block per sequence can't be had back.
    assert short["waste_ratio"] >= 0.9 * short["floor_ratio"]


def test_waste_is_the_same_each_time(capsys: Capture) -> None:
    kv_waste.main(["--requests=40"])
    kv_waste.main(["--requests=40"])

    first_chat, first_short, *again = lines(capsys)
    assert again == [first_chat, first_short]


def test_the_scheduler_benchmark_gives_each_part(capsys: Capture) -> None:
    scheduler.main(["--running", "4", "8", "--steps=5"])

    found = lines(capsys)
    assert [line["running"] for line in found] == [4, 8]
    for line in found:
        assert set(line) == {"running", "step_us", "plan_us", "process_us", "deliver_us"}
        assert line["step_us"] > 0


def test_the_simulator_gives_latencies_and_rates(capsys: Capture) -> None:
    simulate.main(["agents", "--requests=50", "--sweep-requests=20"])

    paged, caching, *others, run = lines(capsys)
    assert run["finished"] == 56
    assert run["prefix_hit_ratio"] > 0.5
    assert {"ttft_p99_s", "itl_p99_s", "waste_ratio", "recomputes", "swaps", "wall_s"} <= set(run)
    assert (paged["server"], caching["server"], run["server"]) == ("paged", "paged-caching", "paged-caching")
    assert paged["paged_ratio"] == 1.0
    assert [line["server"] for line in others] == [
        "static-max",
        "continuous-max",
        "continuous-pow2",
        "continuous-oracle",
    ]


@pytest.mark.skipif(not importlib.util.find_spec("matplotlib"), reason="the extra `bench` is not installed")
def test_results_are_kept(tmp_path: Path, capsys: Capture) -> None:
    simulate.main(["--requests=0", "--sweep-requests=10", f"--results={tmp_path}"])

    settings, *kept = [json.loads(line) for line in (tmp_path / "simulate.jsonl").read_text().splitlines()]
    assert {"date", "hardware", "seed", "fixed_s"} <= set(settings)
    assert kept[:6] == lines(capsys)
    assert (tmp_path / "simulate.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("main", "flags", "said"),
    [
        (scheduler.main, ["--running", "0"], "--running: must be at least 1, not 0"),
        (scheduler.main, ["--steps", "0"], "--steps: must be at least 1, not 0"),
        (kv_waste.main, ["--requests", "-5"], "--requests: must be at least 1, not -5"),
        (kv_waste.main, ["--block-size", "0"], "--block-size: must be at least 1, not 0"),
        (simulate.main, ["--rate", "nan"], "--rate: must be more than 0, not nan"),
        (simulate.main, ["--rate", "0"], "--rate: must be more than 0, not 0"),
        (simulate.main, ["--latency-bound", "0"], "--latency-bound: must be more than 0, not 0"),
        (simulate.main, ["--requests", "-1"], "--requests: must be at least 0, not -1"),
        (simulate.main, ["--sweep-requests", "0"], "--sweep-requests: must be at least 1, not 0"),
        (soak.main, ["--minutes", "nan"], "--minutes: must be more than 0, not nan"),
        (soak.main, ["--minutes", "long"], "--minutes: must be more than 0, not long"),
        (faults.main, ["--requests", "1.5"], "--requests: must be at least 1, not 1.5"),
        (faults.main, ["--max-tokens", "9000"], "--max-tokens: must be at most 8152, not 9000"),
        (
            faults.main,
            ["--quick", "--only", "router_connection_half_open"],
            "--only: router_connection_half_open takes minutes; leave out --quick",
        ),
    ],
)
def test_a_bad_flag_is_named(
    main: Callable[[list[str]], None], flags: list[str], said: str, capsys: Capture
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(flags)

    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("main", "flags"),
    [
        (kv_waste.main, ["--requests=20", "--num-blocks=1"]),
        (simulate.main, ["--requests=0", "--sweep-requests=5", "--num-blocks=1"]),
        (simulate.main, ["--requests=0", "--sweep-requests=5", "--results=/proc/nowhere"]),
    ],
)
def test_what_cannot_run_says_why_in_one_line(
    main: Callable[[list[str]], None], flags: list[str], capsys: Capture
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(flags)

    assert ended.value.code == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_several_replicas_find_nearly_what_one_finds_and_share_the_work(capsys: Capture) -> None:
    replicas.main(["--requests=800", "--concurrency=64"])

    one, four = lines(capsys)
    assert (one["replicas"], four["replicas"]) == (1, 4)
    assert four["of_one_replica"] >= 0.9
    assert four["imbalance"] <= 1.5


def test_what_no_cache_can_find_has_no_share_of_it(capsys: Capture) -> None:
    replicas.main(["--requests=1", "--replicas=2"])

    assert [line.get("of_one_replica") for line in lines(capsys)] == [None, None]


def test_each_of_two_routers_gets_greedy_and_sampled_requests_to_lose() -> None:
    temperatures = [spec.sampling.temperature for spec in faults.requests(8, 4)]

    assert [sum(temperatures[router::2]) for router in range(2)] == [2, 2]
