"""Shared blocks: forks, beams, prefixes, swaps. Failure kinds that are known stay dead."""

from collections import Counter
from random import Random

import pytest

from pagoda.v1.inference_pb2 import PriorOutput
from scheduler.beam_search import BeamSearch
from scheduler.block_pool import BlockPool
from scheduler.invariants import check
from scheduler.request import State
from scheduler.totals import Totals
from tests.scheduler.fake_shard import expected_beams, expected_output
from tests.scheduler.harness import Harness, limits, submit


def outputs_of(prompt: list[int], max_tokens: int, n: int) -> list[list[int]]:
    return [expected_output(prompt, max_tokens, output_index=index) for index in range(n)]


def got(harness: Harness, name: str, n: int) -> list[list[int]]:
    return [harness.all_outputs[name, index] for index in range(n)]


# Parallel sampling.


def test_outputs_share_the_prompt_and_the_first_divergent_write_copies_one_block() -> None:
    harness = Harness(limits(num_blocks=32))
    prompt = list(range(10))
    harness.add(submit("a", prompt, 2, n=3))

    harness.send()
    harness.receive()
    # Two full blocks and a partial one, held by all three.
    device = harness.scheduler.blocks.device
    assert (device.num_used, device.num_shared) == (3, 3)

    harness.send()
    # The last to write may write in place.
    assert harness.scheduler.totals.copies == 2
    assert (device.num_used, device.num_shared) == (5, 2)
    harness.run()
    assert got(harness, "a", 3) == outputs_of(prompt, 2, 3)
    assert harness.shard.computed_tokens == 10 + 3


@pytest.mark.parametrize("length", [3, 4, 5, 7, 8, 9])
@pytest.mark.parametrize("max_tokens", [1, 3, 4, 5, 8])
@pytest.mark.parametrize("n", [1, 3])
def test_prompts_and_outputs_around_block_borders(length: int, max_tokens: int, n: int) -> None:
    harness = Harness(limits(num_blocks=32))
    prompt = list(range(length))
    harness.add(submit("a", prompt, max_tokens, n=n))
    harness.run()

    assert got(harness, "a", n) == outputs_of(prompt, max_tokens, n)
    assert harness.shard.computed_tokens == length + n * (max_tokens - 1)


def test_n_counts_against_max_num_seqs_before_the_fork() -> None:
    harness = Harness(limits(max_num_seqs=4, num_blocks=64, max_num_batched_tokens=8))
    harness.add(submit("three", list(range(30)), 4, n=3))
    harness.add(submit("two", [1], 4, n=2))

    harness.send()

    assert {s.request.key[0] for s in harness.scheduler.running} == {"three"}
    harness.run()
    assert got(harness, "two", 2) == outputs_of([1], 4, 2)


def test_a_leader_that_is_cancelled_before_the_fork_has_an_heir() -> None:
    harness = Harness(limits(num_blocks=64, max_num_batched_tokens=8))
    prompt = list(range(30))
    request = harness.add(submit("a", prompt, 4, n=3))
    harness.send()
    assert [s.state for s in request.sequences] == [State.RUNNING, State.FORKING, State.FORKING]

    harness.scheduler.finish(request.sequences[0])

    harness.run()
    assert got(harness, "a", 3)[1:] == outputs_of(prompt, 4, 3)[1:]


# Prefix cache.


def test_the_same_prompt_twice_in_one_step_is_computed_once() -> None:
    harness = Harness(limits(num_blocks=32, max_num_batched_tokens=64))
    prompt = list(range(18))
    harness.add(submit("a", prompt, 3))
    harness.add(submit("b", prompt, 3))

    plan = harness.send()

    assert plan
    assert {s.request.key[0]: count for s, count in plan.scheduled} == {"a": 18, "b": 2}
    harness.run()
    assert harness.outputs["a"] == harness.outputs["b"] == expected_output(prompt, 3)


def test_a_prompt_that_another_one_is_computing_is_waited_for() -> None:
    harness = Harness(limits(num_blocks=64, max_num_batched_tokens=12, max_num_seqs=8))
    prompt = list(range(60))
    for index in range(5):
        harness.add(submit(f"r{index}", [*prompt, index], 1))

    harness.run()

    assert harness.shard.computed_tokens == 60 + 5
    for index in range(5):
        assert harness.outputs[f"r{index}"] == expected_output([*prompt, index], 1)


@pytest.mark.parametrize("length", [4, 8, 9, 16])
def test_a_prompt_that_is_all_cached_computes_its_last_token(length: int) -> None:
    harness = Harness(limits())
    prompt = list(range(length))
    for name in "ab":
        harness.add(submit(name, prompt, 5))
        harness.run()

    assert harness.outputs["b"] == expected_output(prompt, 5)
    assert harness.requests["b"].sequences[0].cached_tokens == (length - 1) // 4 * 4


def test_a_preempted_request_finds_its_own_blocks_again() -> None:
    harness = Harness(limits(num_blocks=16, max_num_batched_tokens=32))
    for name in "ab":
        harness.add(submit(name, [ord(name)] * 8, 28))

    harness.run()

    assert harness.scheduler.totals.recomputes > 0
    assert harness.scheduler.totals.hit_tokens > 0
    for name in "ab":
        assert harness.outputs[name] == expected_output([ord(name)] * 8, 28)


def test_later_blocks_of_a_prefix_are_evicted_first() -> None:
    pool = BlockPool(4, Totals())
    table = pool.allocate(4)
    for block in table:
        pool.register(block, bytes([block]))
    pool.free(table)

    evicted = pool.allocate(3)

    assert evicted == table[:0:-1]
    assert pool.find(bytes([table[0]])) == table[0]


def test_a_hit_saves_a_block_from_eviction() -> None:
    pool = BlockPool(2, Totals())
    first, second = pool.allocate(2)
    for block in (first, second):
        pool.register(block, bytes([block]))
    pool.free([first])
    pool.free([second])
    pool.share([first])
    pool.free([first])

    assert pool.allocate(1) == [second]


def test_salts_keep_requests_apart() -> None:
    harness = Harness(limits(num_blocks=32))
    for name, salt in (("a", ""), ("b", "x"), ("c", "x")):
        harness.add(submit(name, list(range(9)), 1, cache_salt=salt))
        harness.run()

    cached = {name: request.sequences[0].cached_tokens for name, request in harness.requests.items()}
    assert cached == {"a": 0, "b": 0, "c": 8}


# Swap and recompute.


def pressed(**options: object) -> Harness:
    """Several requests of several outputs on a pool for about one of them."""
    defaults = {"num_blocks": 14, "max_num_seqs": 8, "max_num_batched_tokens": 16}
    harness = Harness(limits(**{**defaults, **options}))  # type: ignore[arg-type]
    for index in range(6):
        harness.add(submit(f"r{index}", [index] * 9, 12, n=2), arrival=index)
    return harness


@pytest.mark.parametrize("num_host_blocks", [0, 1, 5, 100])
@pytest.mark.parametrize("mode", ["auto", "swap", "recompute"])
def test_many_requests_of_several_outputs_with_chunked_prefill(num_host_blocks: int, mode: str) -> None:
    harness = pressed(num_host_blocks=num_host_blocks, preemption_mode=mode)

    harness.run()

    totals = harness.scheduler.totals
    assert totals.preemptions > 0
    assert (totals.swaps > 0) == (num_host_blocks >= 5 and mode != "recompute")
    for index in range(6):
        assert got(harness, f"r{index}", 2) == outputs_of([index] * 9, 12, 2)


def swapped_out(harness: Harness) -> str:
    """Runs until a request is swapped out; its name."""
    while True:
        harness.send()
        for sequence in harness.scheduler.waiting:
            if sequence.host_table:
                return sequence.request.key[0]
        if len(harness.in_flight) == 2:
            harness.receive()


def test_auto_recomputes_one_sequence_and_swaps_several() -> None:
    harness = Harness(limits(num_blocks=8, num_host_blocks=100, max_num_batched_tokens=32))
    for name in "ab":
        harness.add(submit(name, [ord(name)] * 4, 20))
    harness.run()
    assert (harness.scheduler.totals.recomputes > 0, harness.scheduler.totals.swaps) == (True, 0)

    harness = pressed(num_host_blocks=100)
    swapped_out(harness)
    harness.run()
    assert harness.scheduler.totals.swapped_in > 0


def test_shared_blocks_are_swapped_once() -> None:
    harness = pressed(num_host_blocks=100)
    name = swapped_out(harness)

    tables = [s.host_table for s in harness.requests[name].sequences]
    held = Counter(block for table in tables for block in table)

    assert len(tables) == 2
    assert max(held.values()) == 2
    assert harness.scheduler.blocks.host.num_used == len(held)


def test_cancel_while_swapped_out_frees_the_host() -> None:
    harness = pressed(num_host_blocks=100)
    name = swapped_out(harness)

    for sequence in list(harness.requests[name].sequences):
        harness.scheduler.finish(sequence)
        check(harness.scheduler)

    assert harness.scheduler.blocks.host.num_used == 0
    harness.run()


def test_cancel_while_a_block_is_being_copied() -> None:
    harness = Harness(limits(num_blocks=32))
    request = harness.add(submit("a", [1] * 5, 9, n=2))
    harness.send()
    harness.receive()
    harness.send()
    assert harness.scheduler.totals.copies == 1

    harness.scheduler.finish(request.sequences[0])
    check(harness.scheduler)

    harness.run()
    assert harness.all_outputs["a", 1] == expected_output([1] * 5, 9, output_index=1)


def test_cancel_in_the_step_that_finishes() -> None:
    harness = Harness(limits())
    request = harness.add(submit("a", [1] * 5, 1))
    harness.send()

    harness.scheduler.finish(request.sequences[0])
    harness.receive()

    assert harness.outputs["a"] == []
    assert harness.scheduler.blocks.device.num_used == 0


def test_unfinished_prefills_are_not_swapped() -> None:
    harness = Harness(
        limits(
            num_blocks=12,
            num_host_blocks=100,
            preemption_mode="swap",
            max_num_batched_tokens=8,
            max_num_seqs=4,
        )
    )
    harness.add(submit("old", [1] * 4, 40), arrival=0)
    prompt = list(range(44))
    harness.add(submit("young", prompt, 2), arrival=1)
    while not harness.scheduler.totals.preemptions:
        while len(harness.in_flight) < 2 and harness.send():
            pass
        harness.receive()

    young = harness.requests["young"].sequences[0]
    assert (len(young.token_ids), young.num_computed) == (44, 0)
    assert harness.scheduler.totals.swaps == 0
    harness.run()
    assert harness.outputs["young"] == expected_output(prompt, 2)


def test_nothing_is_admitted_while_a_paused_request_waits() -> None:
    harness = pressed(num_host_blocks=100)
    name = swapped_out(harness)
    ranks = [request.rank for request in harness.requests.values()]
    late = harness.add(submit("late", [7], 1), arrival=99)
    assert late.rank > max(ranks)

    while harness.requests[name].sequences[0].state is State.WAITING:
        assert late.sequences[0].state is State.WAITING
        while len(harness.in_flight) < 2 and harness.send():
            pass
        harness.receive()


# Priorities.


def test_a_lower_priority_number_goes_first_and_is_preempted_last() -> None:
    harness = Harness(limits(max_num_seqs=1))
    harness.add(submit("running", [1], 2), arrival=0)
    harness.send()
    for name, priority in (("late", 5), ("soon", -1), ("plain", 0)):
        harness.add(submit(name, [2], 2, priority=priority), arrival=1)

    assert [s.request.key[0] for s in harness.scheduler.waiting] == ["soon", "plain", "late"]


def test_the_lowest_rank_pays_for_memory() -> None:
    harness = Harness(limits(num_blocks=8, max_num_batched_tokens=32))
    harness.add(submit("unimportant", [1] * 4, 20, priority=9), arrival=0)
    harness.add(submit("important", [2] * 4, 20, priority=0), arrival=1)
    while not harness.scheduler.totals.preemptions:
        while len(harness.in_flight) < 2 and harness.send():
            pass
        harness.receive()

    assert [s.request.key[0] for s in harness.scheduler.waiting] == ["unimportant"]
    harness.run()
    assert harness.outputs["unimportant"] == expected_output([1] * 4, 20)


def test_beams_that_are_dropped_free_their_blocks_back_to_the_last_shared_one() -> None:
    harness = Harness(limits(num_blocks=64, max_num_seqs=4))
    request = harness.add(submit("a", list(range(9)), 20, beam_width=4))
    device = harness.scheduler.blocks.device
    while harness.send():
        harness.receive()
        held = {block for sequence in request.sequences for block in sequence.block_table}
        assert device.num_used == len(held)
    assert device.num_used == 0
    assert len(harness.outputs["a"]) == 20


@pytest.mark.parametrize("seed", range(200))
def test_beams_preempted_between_their_results_do_not_go_on_halfway(seed: int) -> None:
    """Beams recomputed in chunks sample in different steps: some have candidates, others are in flight."""
    random = Random(seed)
    harness = Harness(
        limits(
            num_blocks=64,
            max_num_batched_tokens=8,
            preemption_mode="recompute",
            prefix_caching=bool(seed % 2),
        )
    )
    width = random.randint(2, 3)
    prompt = list(range(random.randint(5, 30)))
    request = harness.add(submit("a", prompt, 8, n=width, beam_width=width))

    for _ in range(60):
        action = random.choices(["send", "receive", "preempt"], [9, 9, 2])
        if action == ["send"] and len(harness.in_flight) < 2:
            harness.send()
        elif action == ["receive"] and harness.in_flight:
            harness.receive()
        elif action == ["preempt"] and request.running:
            harness.scheduler._preempt(request)
    harness.run()

    search = BeamSearch(width, 1, False, frozenset(), 8)
    assert [harness.all_outputs["a", index] for index in range(width)] == expected_beams(prompt, search)


def test_a_beam_search_that_was_lost_begins_anew() -> None:
    """A router's resubmit says that the request was accepted before, and holds no tokens of it."""
    harness = Harness(limits(num_blocks=64))
    prior = [PriorOutput(index=index) for index in range(2)]
    harness.add(submit("a", [1, 2, 3], 8, n=2, beam_width=3))
    harness.add(submit("b", [1, 2, 3], 8, n=2, beam_width=3, prior_outputs=prior))

    harness.run()

    assert got(harness, "b", 2) == got(harness, "a", 2)
    assert [len(tokens) for tokens in got(harness, "b", 2)] == [8, 8]
