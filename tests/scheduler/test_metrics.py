"""What a scrape says of a scheduler, against what was done to it."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from pagoda.shard.v1.shard_pb2 import ExecuteResponse
from pagoda.v1.inference_pb2 import PriorOutput
from scheduler import metrics
from tests.samples import growth, sample
from tests.scheduler.harness import Harness, limits, submit
from tests.scheduler.test_engine import serving


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Callable[[Harness], None]:
    def watch(harness: Harness) -> None:
        engine: Any = SimpleNamespace(scheduler=harness.scheduler, block_bytes=100)
        monkeypatch.setattr(metrics._state, "engine", engine)

    return watch


def test_shared_blocks_count_once_in_the_waste(watched: Callable[[Harness], None]) -> None:
    """Two outputs of 9 tokens: two shared blocks of 4, and one with a token in it for both."""
    harness = Harness(limits(num_blocks=16, block_size=4))
    watched(harness)
    harness.add(submit("a", range(9), 8, n=2))
    harness.send()

    assert sample("pagoda_kv_blocks", tier="device", state="used") == 3
    assert sample("pagoda_kv_shared_blocks", tier="device") == 3
    assert sample("pagoda_kv_utilisation_ratio", tier="device") == 3 / 16
    assert sample("pagoda_kv_slots", state="filled") == 9
    assert sample("pagoda_kv_slots", state="empty") == 3
    assert sample("pagoda_kv_partial_blocks") == 1
    assert sample("pagoda_kv_waste_ratio") == 3 / 12


def test_swapped_bytes_are_those_of_the_blocks(watched: Callable[[Harness], None]) -> None:
    harness = Harness(limits(num_blocks=8, num_host_blocks=8, preemption_mode="swap"))
    watched(harness)
    harness.add(submit("a", range(8), 16))
    harness.add(submit("b", range(8, 16), 16))
    harness.run()

    blocks = sample("pagoda_kv_blocks_swapped_total", direction="out")
    assert blocks > 0
    assert sample("pagoda_kv_swapped_bytes_total", direction="out") == 100 * blocks
    assert sample("pagoda_scheduler_preemptions_total", mode="swap") > 0


def test_the_oldest_that_waits_is_the_oldest_that_never_ran(
    watched: Callable[[Harness], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Harness(limits(max_num_seqs=1))
    watched(harness)
    monkeypatch.setattr("scheduler.metrics.time.monotonic", lambda: 100.0)
    for name, arrival in (("a", 10.0), ("b", 40.0), ("c", 70.0)):
        harness.add(submit(name, [1, 2, 3], 4), arrival)
    harness.send()

    assert sample("pagoda_scheduler_waiting_sequences") == 2
    assert sample("pagoda_scheduler_paused_sequences") == 0
    assert sample("pagoda_scheduler_oldest_waiting_seconds") == 60


def test_a_first_admission_is_a_wait_in_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler.metrics.time.monotonic", lambda: 100.0)
    harness = Harness(limits())
    waits = growth("pagoda_scheduler_queue_seconds_count")
    seconds = growth("pagoda_scheduler_queue_seconds_sum")
    resumed = submit("b", [1], 9, prior_outputs=[PriorOutput(index=0, token_ids=[5])])
    harness.add(submit("a", [1, 2, 3], 4), 97.0)
    harness.add(resumed, 1.0)

    plan = harness.send()

    assert plan
    metrics.observe_plan(plan, 0.001)
    assert (waits(), seconds()) == (1, 3)


def test_the_parts_of_a_step_add_up() -> None:
    parts = {
        phase: growth("pagoda_scheduler_step_phase_seconds_sum", phase=phase)
        for phase in ("wire", "compute", "sample")
    }

    metrics.observe_result(ExecuteResponse(compute_seconds=0.5, sample_seconds=0.25), 2.0, 1.0)

    assert {phase: part() for phase, part in parts.items()} == {"wire": 0.25, "compute": 0.5, "sample": 0.25}


def test_a_clock_that_disagrees_takes_nothing_off_the_wire() -> None:
    wire = growth("pagoda_scheduler_step_phase_seconds_sum", phase="wire")

    metrics.observe_result(ExecuteResponse(compute_seconds=2.0), 1.0, 1.0)

    assert wire() == 0


@pytest.mark.parametrize(
    ("cause", "prompt", "fields"),
    [
        ("invalid", [], {}),
        ("never_fits", [1] * 500, {}),
        ("model_changed", [1], {"model_revision": "another"}),
        ("unserved", [1], {"adapter": "one"}),
        ("key_limit", [1], {"tenant": "acme", "max_tenant_requests": 1}),
    ],
)
async def test_refusals_are_counted_by_cause(cause: str, prompt: list[int], fields: dict[str, Any]) -> None:
    async with serving() as (engine, client, router):
        client.may_answer.clear()
        engine.submit(router.outbox, submit("first", [1], 4, tenant="acme"))
        refused = growth("pagoda_scheduler_requests_refused_total", cause=cause)
        accepted = growth("pagoda_scheduler_requests_accepted_total")

        engine.submit(router.outbox, submit("second", prompt, 4, **fields))

        assert (refused(), accepted()) == (1, 0)
        client.may_answer.set()
        await router.until(lambda: router.reasons)


async def test_the_shard_is_up_while_it_takes_steps() -> None:
    async with serving():
        assert sample("pagoda_scheduler_shard_up") == 1

    assert sample("pagoda_scheduler_shard_up") == 0
