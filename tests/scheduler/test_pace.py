"""When the step behind the one that runs is planned."""

import pytest

from scheduler.pace import LEAD_S, REMEMBERED_STEPS, Pace


def paced(*durations: float) -> Pace:
    pace = Pace()
    for duration in durations:
        pace.observe(duration)
    return pace


def test_the_first_steps_are_not_held() -> None:
    assert Pace().hold_s(0.0) == 0


def test_a_step_is_held_until_shortly_before_the_one_ahead_ends() -> None:
    assert paced(0.1).hold_s(0.0) == pytest.approx(0.1 - LEAD_S)
    assert paced(0.1).hold_s(0.07) == pytest.approx(0.03 - LEAD_S)
    assert paced(0.1).hold_s(0.2) == 0


def test_the_shortest_of_the_last_steps_counts() -> None:
    assert paced(0.5, 0.1, 0.5).hold_s(0.0) == pytest.approx(0.1 - LEAD_S)
    assert paced(0.1, *[0.5] * REMEMBERED_STEPS).hold_s(0.0) == pytest.approx(0.5 - LEAD_S)


def test_short_steps_are_never_held() -> None:
    assert paced(LEAD_S).hold_s(0.0) == 0
