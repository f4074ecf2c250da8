"""Traces are what they are said to be, and the same each time."""

from statistics import fmean

import pytest

from benchmarks.arrivals import ArrivalQueue
from benchmarks.traces import (
    ALPACA_LIKE,
    SHAREGPT_LIKE,
    TRACES,
    Lengths,
    agents,
    at_once,
    bursts,
    chat,
    poisson,
)


@pytest.mark.parametrize("lengths", [SHAREGPT_LIKE, ALPACA_LIKE])
def test_means_are_those_of_the_paper(lengths: tuple[Lengths, Lengths]) -> None:
    trace = chat(20_000, at_once(), lengths)

    assert fmean(request.prompt_length for request in trace) == pytest.approx(lengths[0].mean, rel=0.03)
    assert fmean(request.output_length for request in trace) == pytest.approx(lengths[1].mean, rel=0.03)
    assert max(request.prompt_length for request in trace) <= lengths[0].longest
    assert min(request.output_length for request in trace) >= 1


@pytest.mark.parametrize("name", TRACES)
def test_a_seed_gives_one_trace(name: str) -> None:
    assert TRACES[name](40, 2.0, 7) == TRACES[name](40, 2.0, 7)
    assert TRACES[name](40, 2.0, 7) != TRACES[name](40, 2.0, 8)


@pytest.mark.parametrize("name", TRACES)
def test_arrivals_have_the_rate_that_was_asked_for(name: str) -> None:
    trace = TRACES[name](8_000, 4.0, 0)

    last = max(request.arrival_s for request in trace if request.follows is None)
    assert len(trace) / last == pytest.approx(4.0, rel=0.1)


def test_a_rate_changes_arrivals_alone() -> None:
    slow, fast = (TRACES["sharegpt-like"](50, rate, 3) for rate in (1.0, 2.0))

    assert [request.prompt for request in slow] == [request.prompt for request in fast]
    assert slow[-1].arrival_s == pytest.approx(2 * fast[-1].arrival_s)


def test_bursts_come_together() -> None:
    trace = chat(64, bursts(8.0, 32))

    assert len({request.arrival_s for request in trace}) == 2


def test_private_text_is_private_and_system_prompts_are_shared() -> None:
    trace = chat(100, poisson(1.0), ALPACA_LIKE, system_prompts=2, system_prompt_length=32)

    systems = {tuple(request.token_ids[:32]) for request in trace}
    texts = {request.token_ids[32] for request in trace}
    assert len(systems) == 2
    assert len(texts) == 100


def test_an_agents_turn_begins_with_the_last_turn_and_its_output() -> None:
    first, second, third = agents(1, 3, poisson(1.0))

    assert second.token_ids[: first.prompt_length] == first.token_ids
    answer = second.token_ids[first.prompt_length :][: first.output_length]
    assert answer == [first.output_id] * first.output_length
    assert (first.follows, second.follows, third.follows) == (None, 0, 1)


def test_a_follower_arrives_after_the_end_of_what_it_follows() -> None:
    first, second = agents(1, 2, poisson(1.0))
    queue = ArrivalQueue([first, second])
    queue.until(first.arrival_s)
    assert queue.next_s is None

    queue.finished(0, 100.0)

    assert queue.next_s == 100.0 + second.arrival_s
