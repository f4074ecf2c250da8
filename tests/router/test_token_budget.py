"""Tokens over time: on average what is allowed, and the wait that is announced is the true one."""

import pytest

from router.token_budget import TokenBudget


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_minutes_worth_is_there_at_once(clock: Clock) -> None:
    budget = TokenBudget(600, clock)

    budget.take(600)
    assert budget.wait_s() == 0
    budget.take(1)
    assert budget.wait_s() > 0


def test_what_was_used_beyond_it_is_waited_for_exactly(clock: Clock) -> None:
    budget = TokenBudget(600, clock)
    budget.take(650)

    wait_s = budget.wait_s()

    assert wait_s == 5
    clock.now += wait_s - 0.25
    assert budget.wait_s() == 0.25
    clock.now += 0.25
    assert budget.wait_s() == 0


def test_no_more_than_a_minutes_worth_is_saved_up(clock: Clock) -> None:
    budget = TokenBudget(600, clock)

    clock.now += 3600
    budget.take(660)

    assert budget.wait_s() == 6
