"""A request that makes the shard fail is found, and the others go on together."""

import pytest

from scheduler.request import Request
from scheduler.step_plan import StepPlan
from scheduler.suspects import CLEARED_AFTER_STEPS_ALONE, SUSPECT_AFTER_FAILED_STEPS
from tests.scheduler.fake_shard import expected_output
from tests.scheduler.harness import Harness, limits, submit


def names(plan: StepPlan | None) -> str:
    assert plan
    return "".join(sorted({sequence.request.key[0] for sequence, _ in plan.scheduled}))


def fail(harness: Harness) -> list[Request]:
    """The steps in flight fail; those that are found out are ended, as the engine does."""
    plans = list(harness.in_flight)
    harness.fail()
    found = harness.scheduler.suspects.blame(plans)
    for request in found:
        for sequence in request.sequences:
            harness.scheduler.finish(sequence)
    return found


@pytest.fixture
def suspected() -> Harness:
    """Three requests that were in as many failed steps as it takes."""
    harness = Harness(limits(num_blocks=64))
    for name in "abc":
        harness.add(submit(name, [ord(name)] * 5, 12))
    for _ in range(SUSPECT_AFTER_FAILED_STEPS):
        assert names(harness.send()) == "abc"
        assert fail(harness) == []
    return harness


def test_suspects_run_alone_in_turn_and_then_together(suspected: Harness) -> None:
    ran = []
    for _ in range(3 * CLEARED_AFTER_STEPS_ALONE + 1):
        ran.append(names(suspected.send()))
        suspected.receive()

    alone = CLEARED_AFTER_STEPS_ALONE
    assert ran == ["a"] * alone + ["b"] * alone + ["c"] * alone + ["abc"]


def test_nobody_loses_a_token_to_suspicion(suspected: Harness) -> None:
    suspected.run()

    assert suspected.outputs == {name: expected_output([ord(name)] * 5, 12) for name in "abc"}


def test_one_that_fails_alone_is_found_out_and_the_next_is_tried(suspected: Harness) -> None:
    assert names(suspected.send()) == "a"

    assert fail(suspected) == [suspected.requests["a"]]
    assert names(suspected.send()) == "b"


def test_new_requests_wait_until_no_one_is_suspected(suspected: Harness) -> None:
    suspected.add(submit("d", [9] * 5, 12))

    ran = []
    for _ in range(3 * CLEARED_AFTER_STEPS_ALONE + 1):
        ran.append(names(suspected.send()))
        suspected.receive()

    assert [step for step in ran if "d" in step] == ["abcd"]


def test_a_suspect_that_is_aborted_holds_nobody_up(suspected: Harness) -> None:
    for name in "ab":
        suspected.scheduler.finish(suspected.requests[name].sequences[0])
    suspected.add(submit("d", [9] * 5, 12))

    suspected.run()

    assert suspected.outputs["d"] == expected_output([9] * 5, 12)


def test_one_that_was_cleared_is_suspected_anew_only_after_as_many_failures(suspected: Harness) -> None:
    for _ in range(3 * CLEARED_AFTER_STEPS_ALONE):
        suspected.send()
        suspected.receive()

    assert names(suspected.send()) == "abc"
    assert fail(suspected) == []
    assert len(names(suspected.send())) > 1


@pytest.mark.parametrize("n", [1, 3])
def test_sequences_of_one_suspect_run_together(n: int) -> None:
    harness = Harness(limits(num_blocks=64))
    harness.add(submit("a", [5] * 5, 12, n=n))
    for _ in range(SUSPECT_AFTER_FAILED_STEPS):
        harness.send()
        fail(harness)

    harness.run()

    assert all(len(harness.all_outputs["a", index]) == 12 for index in range(n))
