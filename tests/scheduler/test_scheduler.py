"""The policy, step by step."""

import pytest

from pagoda.v1.inference_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP
from scheduler.invariants import check
from scheduler.request import State
from tests.scheduler.fake_shard import expected_output
from tests.scheduler.harness import Harness, limits, submit


def counts(harness: Harness) -> dict[str, int]:
    """Plans a step; tokens by request."""
    plan = harness.send()
    return {sequence.request.key[0]: count for sequence, count in plan.scheduled} if plan else {}


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 31])
@pytest.mark.parametrize("max_tokens", [1, 2, 4, 5, 13])
def test_one_request_alone(length: int, max_tokens: int) -> None:
    harness = Harness(limits())
    prompt = list(range(length))
    harness.add(submit("a", prompt, max_tokens))

    harness.run()

    assert harness.outputs["a"] == expected_output(prompt, max_tokens)
    assert harness.reasons["a"] == FINISH_REASON_LENGTH
    assert harness.scheduler.blocks.device.num_used == 0
    # The last token is never computed; nothing else is computed twice.
    assert harness.shard.computed_tokens == length + max_tokens - 1


def test_a_stop_token_ends_the_output_and_the_token_in_flight_is_dropped() -> None:
    harness = Harness(limits())
    output = expected_output([1, 2, 3], 10)
    harness.add(submit("a", [1, 2, 3], 10, stop=[output[4]]))

    harness.run()

    assert harness.outputs["a"] == output[:5]
    assert harness.reasons["a"] == FINISH_REASON_STOP


def test_min_tokens_puts_a_stop_token_off() -> None:
    harness = Harness(limits())
    output = expected_output([1, 2, 3], 10)
    harness.add(submit("early", [1, 2, 3], 10, stop=[output[4]], min_tokens=5))
    harness.add(submit("in time", [1, 2, 3], 10, stop=[output[4]], min_tokens=4))

    harness.run()

    assert harness.outputs["early"] == expected_output([1, 2, 3], 10, frozenset([output[4]]), min_tokens=5)
    assert len(harness.outputs["early"]) > 5
    assert harness.outputs["in time"] == output[:5]


def test_the_shard_learns_stop_tokens_where_it_needs_them() -> None:
    harness = Harness(limits())
    harness.add(submit("a", [1, 2, 3], 10, stop=[7]))
    harness.add(submit("b", [4, 5, 6], 10, stop=[7], min_tokens=2))

    plan = harness.send()

    assert plan
    assert [(list(join.stop_token_ids), join.min_tokens) for join in plan.command.joins] == [
        ([], 0),
        ([7], 2),
    ]


def test_no_max_tokens_runs_to_the_end_of_the_context() -> None:
    harness = Harness(limits(max_model_len=20))
    harness.add(submit("a", [1, 2, 3]))

    harness.run()

    assert len(harness.outputs["a"]) == 17


def test_no_max_tokens_runs_to_the_end_of_the_pool_when_that_is_smaller() -> None:
    harness = Harness(limits(num_blocks=2))
    harness.add(submit("a", [1, 2, 3]))

    harness.run()

    # 8 slots, and one token more that needs no slot.
    assert len(harness.outputs["a"]) == 6


def test_a_long_prompt_is_computed_in_chunks_beside_decodes() -> None:
    harness = Harness(limits(max_num_batched_tokens=10, num_blocks=32))
    harness.add(submit("short", [1], 20))
    assert counts(harness) == {"short": 1}
    harness.add(submit("long", list(range(30)), 4))

    assert counts(harness) == {"short": 1, "long": 9}
    harness.receive()
    assert counts(harness) == {"short": 1, "long": 9}


def test_short_prompts_pass_a_long_one() -> None:
    harness = Harness(limits(max_num_batched_tokens=16, num_blocks=64))
    harness.add(submit("long", list(range(100)), 1))
    for name in "ab":
        harness.add(submit(name, [1, 2, 3, 4], 1))

    assert counts(harness) == {"long": 8, "a": 4, "b": 4}


def test_an_unused_share_goes_to_the_oldest_prompt() -> None:
    harness = Harness(limits(max_num_batched_tokens=16, num_blocks=64))
    harness.add(submit("long", list(range(100)), 1))
    harness.add(submit("a", [1, 2], 1))

    assert counts(harness) == {"long": 14, "a": 2}


def test_the_latest_arrival_is_preempted_and_all_outputs_stay_right() -> None:
    harness = Harness(limits(num_blocks=8, max_num_batched_tokens=32))
    for name in "abc":
        harness.add(submit(name, [ord(name)] * 4, 20))

    preempted = []
    while harness.scheduler.running or harness.scheduler.waiting or harness.in_flight:
        while len(harness.in_flight) < 2:
            before = {s.request.key[0] for s in harness.scheduler.running}
            if not harness.send():
                break
            preempted += sorted(before - {s.request.key[0] for s in harness.scheduler.running})
            running = {s.request.key[0] for s in harness.scheduler.running}
            waiting = {s.request.key[0] for s in harness.scheduler.waiting}
            assert not running or not waiting or max(running) < min(waiting), "a later one overtook"
        harness.receive()

    assert preempted[0] == "c"
    assert harness.scheduler.totals.preemptions >= 1
    for name in "abc":
        assert harness.outputs[name] == expected_output([ord(name)] * 4, 20)


def test_a_paused_sequence_keeps_the_token_that_was_in_flight() -> None:
    harness = Harness(limits(num_blocks=4, max_num_batched_tokens=32))
    harness.add(submit("a", [1] * 4, 9))
    harness.add(submit("b", [2] * 4, 9))
    while not harness.scheduler.totals.preemptions:
        harness.send()
        if len(harness.in_flight) == 2 and not harness.scheduler.totals.preemptions:
            harness.receive()

    paused = harness.scheduler.waiting[0]
    assert paused.request.key[0] == "b"
    assert paused.num_pending == 1
    known = len(paused.token_ids)
    harness.receive()
    assert len(paused.token_ids) == known + 1

    harness.run()
    assert harness.outputs["b"] == expected_output([2] * 4, 9)


@pytest.mark.parametrize("state", [State.WAITING, State.RUNNING])
def test_finish_frees_at_once_wherever_the_sequence_is(state: State) -> None:
    harness = Harness(limits(max_num_seqs=1))
    harness.add(submit("a", [1] * 9, 9))
    harness.add(submit("b", [2] * 9, 9))
    harness.send()
    name = "a" if state is State.RUNNING else "b"
    sequence = harness.requests[name].sequences[0]
    assert sequence.state is state

    harness.scheduler.finish(sequence)

    check(harness.scheduler)
    assert harness.scheduler.blocks.device.num_used == (0 if state is State.RUNNING else 3)
    harness.run()
    other = "b" if name == "a" else "a"
    assert harness.outputs[other] == expected_output([1 if other == "a" else 2] * 9, 9)
    assert not harness.outputs[name]


def test_a_lost_shard_costs_a_recompute_and_no_token() -> None:
    harness = Harness(limits())
    for name in "abc":
        harness.add(submit(name, [ord(name)] * 5, 12))
    for _ in range(4):
        harness.send()
        harness.send()
        harness.receive()
        harness.fail()

    harness.run()

    for name in "abc":
        assert harness.outputs[name] == expected_output([ord(name)] * 5, 12)


def test_max_num_seqs_bounds_what_runs() -> None:
    harness = Harness(limits(max_num_seqs=2, num_blocks=64))
    for name in "abc":
        harness.add(submit(name, [1, 2], 3))

    harness.send()

    assert len(harness.scheduler.running) == 2
    harness.run()
    assert all(len(output) == 3 for output in harness.outputs.values())


def test_an_earlier_arrival_that_is_resubmitted_goes_first() -> None:
    harness = Harness(limits(max_num_seqs=1))
    harness.add(submit("running", [1], 2), arrival=1.0)
    harness.send()
    harness.add(submit("late", [2], 2), arrival=2.0)
    harness.add(submit("early", [3], 2), arrival=0.5)

    assert [s.request.key[0] for s in harness.scheduler.waiting] == ["early", "late"]
