from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.stop_strings import StopMatcher

LETTERS = st.text(alphabet="ab🙂", max_size=24)
STOPS = st.lists(st.text(alphabet="ab🙂", min_size=1, max_size=5), max_size=4)


def naive(text: str, stops: list[str], include: bool, free: int) -> tuple[str, str | None]:
    """The whole text at once: the match that ends first, after `free` characters, then the longest."""
    for end in range(free + 1, len(text) + 1):
        if found := [stop for stop in stops if text[:end].endswith(stop)]:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def cut(text: str, borders: list[int]) -> list[str]:
    at = sorted({0, len(text), *(border % (len(text) + 1) for border in borders)})
    return [text[start:end] for start, end in pairwise(at)]


@given(LETTERS, STOPS, st.lists(st.integers(0, 100)), st.booleans(), st.integers(0, 5))
def test_any_chunking_gives_what_naive_search_gives(
    text: str, stops: list[str], borders: list[int], include: bool, uncounted: int
) -> None:
    matcher = StopMatcher(stops, include=include)
    chunks = cut(text, borders)
    pushed = [matcher.push(chunk, count=index >= uncounted) for index, chunk in enumerate(chunks)]
    given_out = "".join(pushed) + matcher.flush()
    free = len("".join(chunks[:uncounted]))
    assert (given_out, matcher.matched) == naive(text, stops, include, free)


@given(LETTERS, STOPS)
def test_holds_back_only_what_may_become_a_stop_string(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    seen = given_out = ""
    for character in text:
        seen += character
        given_out += matcher.push(character)
        if matcher.matched:
            break
        held = [
            k for k in range(1, len(seen) + 1) if any(len(s) > k and s.startswith(seen[-k:]) for s in stops)
        ]
        assert given_out == seen[: len(seen) - max(held, default=0)]


def test_part_of_a_stop_string_is_released_when_it_turns_out_not_to_be_one() -> None:
    matcher = StopMatcher(["</answer>"])
    assert [matcher.push(text) for text in ("yes </", "ans", "wer", "s>")] == ["yes ", "", "", "</answers>"]


def test_nothing_is_given_out_after_the_match() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("one END two") == "one "
    assert matcher.push(" three") + matcher.flush() == ""
    assert matcher.matched == "END"


@pytest.mark.parametrize(("include", "text"), [(True, "aXX"), (False, "a")])
def test_include_keeps_the_stop_string(include: bool, text: str) -> None:
    matcher = StopMatcher(["XX"], include=include)
    assert matcher.push("aX") + matcher.push("Xb") == text
