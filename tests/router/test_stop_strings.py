from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.stop_strings import StopMatcher

LETTERS = st.text(alphabet="ab🙂", max_size=24)
STOPS = st.lists(st.text(alphabet="ab🙂", min_size=1, max_size=5), max_size=4)


def naive(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The whole text at once: the match that ends first, then the longest."""
    found = [(text.index(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    end, _, stop = min(found)
    return text[: end if include else end - len(stop)], stop


def cut(text: str, borders: list[int]) -> list[str]:
    at = sorted({0, len(text), *(border % (len(text) + 1) for border in borders)})
    return [text[start:end] for start, end in pairwise(at)]


@given(LETTERS, STOPS, st.lists(st.integers(0, 100)), st.booleans())
def test_any_chunking_gives_what_naive_search_gives(
    text: str, stops: list[str], borders: list[int], include: bool
) -> None:
    matcher = StopMatcher(stops, include=include)
    given_out = "".join(map(matcher.push, cut(text, borders))) + matcher.flush()
    assert (given_out, matcher.matched) == naive(text, stops, include)


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
