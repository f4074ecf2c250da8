"""Patterns: what they allow is what `re` matches, and what can't be honoured is refused."""

import json
import random
import re
from collections.abc import Callable
from itertools import product

import pytest
import xgrammar
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pagoda.v1.inference_pb2 import Constraint
from shard.grammar_compiler import build
from shard.regex import RegexError, to_ebnf, to_json_ebnf

PATTERNS = [
    "[a-z]+",
    "^a|b$",
    ".{1,3}",
    "[^a-c]{2}",
    r"\d\w\s\D\S",
    r"\"\\\/",
    r"(?:ab){2,3}?x*?",
    r"[\w.-]+@x",
    r"[\x41-\u005a]\t",
    "😀[😀-😂]é",
    r"\u{1F600}",
    r"(a|)(b?c*){2}",
    r"[-\]a]{2}",
    "",
]


def texts(grammar: "xgrammar.Grammar", count: int) -> list[str]:
    """Random texts of a grammar, character by character of a small alphabet."""
    alphabet = [
        "a",
        "b",
        "c",
        "x",
        "z",
        "A",
        "0",
        "9",
        "@",
        ".",
        "-",
        "]",
        '"',
        "\\",
        "/",
        " ",
        "\t",
        "\n",
        "n",
        "t",
    ]
    alphabet += ["é", "😀", "😂", "\x05"]
    info = xgrammar.TokenizerInfo([*alphabet, ""], stop_token_ids=[len(alphabet)])
    compiled = xgrammar.GrammarCompiler(info).compile_grammar(grammar)
    choose = random.Random(0)
    found = []
    for _ in range(count):
        matcher, text = xgrammar.GrammarMatcher(compiled), ""
        for _ in range(40):
            mask = xgrammar.allocate_token_bitmask(1, len(alphabet) + 1)
            matcher.fill_next_token_bitmask(mask)
            allowed = [token for token in range(len(alphabet) + 1) if mask[0, 0] >> token & 1]
            token = choose.choice(allowed)
            if token == len(alphabet):
                found.append(text)
                break
            matcher.accept_token(token)
            text += alphabet[token]
    return found


@pytest.mark.parametrize("pattern", PATTERNS)
def test_outputs_match_the_pattern(pattern: str) -> None:
    expected = re.compile(pattern.replace(r"\u{1F600}", "😀"), re.ASCII)

    found = texts(build(Constraint(regex=pattern)), 30)

    assert found
    assert all(expected.search(text) for text in found)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_values_of_json_strings_match_the_pattern(pattern: str) -> None:
    expected = re.compile(pattern.replace(r"\u{1F600}", "😀"), re.ASCII)

    found = texts(build(Constraint(json_schema=json.dumps({"pattern": pattern}))), 30)

    assert found
    assert all(expected.search(json.loads(text)) for text in found)


LETTERS = ["a", "b", "1", "\n"]
"""Of all texts of up to `LENGTH` letters that generated patterns are tried on."""
LENGTH = 5


def whole(grammar: "xgrammar.Grammar", written: list[str], length: int) -> set[str]:
    """All texts of a grammar that are made of up to `length` of `written`."""
    info = xgrammar.TokenizerInfo([*written, ""], stop_token_ids=[len(written)])
    matcher = xgrammar.GrammarMatcher(xgrammar.GrammarCompiler(info).compile_grammar(grammar))
    mask = xgrammar.allocate_token_bitmask(1, len(written) + 1)
    found = set()

    def go_on(text: str, left: int) -> None:
        matcher.fill_next_token_bitmask(mask)
        allowed = int(mask[0, 0])
        if allowed >> len(written) & 1:
            found.add(text)
        for token, piece in enumerate(written if left else ()):
            if allowed >> token & 1:
                matcher.accept_token(token)
                go_on(text + piece, left - 1)
                matcher.rollback(1)

    go_on("", length)
    return found


def matched(pattern: str) -> set[str]:
    every = ("".join(letters) for length in range(LENGTH + 1) for letters in product(LETTERS, repeat=length))
    compiled = re.compile(pattern, re.ASCII)
    return {text for text in every if compiled.fullmatch(text)}


characters = st.sampled_from(
    ["a", "b", "1", r"\n", ".", "[ab]", "[^a]", r"[^\d]", r"\d", r"\w", r"\W", r"\s", r"\S"]
)
quantifiers = st.sampled_from(["", "?", "*", "+", "{2}", "{1,}", "{1,3}", "{0,2}"])
patterns = st.recursive(
    st.builds("{}{}".format, characters, quantifiers),
    lambda inner: st.one_of(
        st.builds("({}){}".format, inner, quantifiers),
        st.builds("{}{}".format, inner, inner),
        st.builds("(?:{}|{}){}".format, inner, inner | st.just(""), quantifiers),
    ),
    max_leaves=5,
)
OPTIONAL_ENDS = ["a(b1{1,3})?a", "(b[0-9]{1,3})?", "((ab?){1,2}|1{2,3})?b"]


def with_examples(test: Callable[[str], None]) -> Callable[[str], None]:
    for pattern in OPTIONAL_ENDS:
        test = example(pattern)(test)
    return settings(deadline=None, max_examples=100, derandomize=True)(given(patterns)(test))


@with_examples
def test_a_grammar_allows_exactly_what_its_pattern_matches(pattern: str) -> None:
    assert whole(build(Constraint(regex=pattern)), LETTERS, LENGTH) == matched(pattern)


@with_examples
def test_a_string_of_json_has_exactly_the_values_that_its_pattern_matches(pattern: str) -> None:
    grammar = build(Constraint(json_schema=json.dumps({"pattern": pattern})))

    found = whole(grammar, ["a", "b", "1", r"\n", '"'], LENGTH + 2)

    assert {json.loads(text) for text in found} == matched(pattern)


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ("2012-11-08T23:21:12Z", True),
        ("2012-11-08T23:21:12.5-06:38", True),
        ("2012-11-08T23:21:121-06:38", False),
        ("2012-11-31T23:21:12Z", False),
    ],
)
def test_a_format_is_kept_to_the_letter(text: str, valid: bool) -> None:
    grammar = build(Constraint(json_schema='{"format": "date-time"}'))
    letters = sorted(set(json.dumps(text)))
    info = xgrammar.TokenizerInfo([*letters, ""], stop_token_ids=[len(letters)])
    matcher = xgrammar.GrammarMatcher(xgrammar.GrammarCompiler(info).compile_grammar(grammar))

    taken = all(matcher.accept_token(letters.index(letter)) for letter in json.dumps(text))

    assert (taken and matcher.is_completed()) is valid


@pytest.mark.parametrize("pattern", [r"\s", r"[^\S]"])
def test_spaces_are_those_of_ecmascript(pattern: str) -> None:
    assert to_ebnf(pattern) == to_ebnf(r"[\t-\r \xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff]")


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(?=a)b", "look-around"),
        ("(?<name>a)", "named"),
        (r"(a)\1", r"\\1 isn't supported"),
        (r"\bfoo", r"\\b isn't supported"),
        (r"\p{L}", r"\\p isn't supported"),
        ("a$b", r"\$ inside the pattern"),
        ("(^a)", r"\^ inside the pattern"),
        ("a**", "nothing to repeat"),
        ("*a", "nothing to repeat"),
        ("a{,3}", "nothing to repeat"),
        ("a{3,1}", "ends before it begins"),
        ("a{1,1000000}", "limit of 10000"),
        ("a}", "a lone }"),
        ("(a", r"unmatched \("),
        ("a)", r"unmatched \)"),
        ("[a", r"unmatched \["),
        ("[]", "without characters"),
        *((pattern, "without characters") for pattern in (r"[^\s\S]", r"[^\d\D]", r"[^\w\W]")),
        ("[z-a]", "no order"),
        (r"[\d-z]", "no order"),
        ("\\", "isn't supported"),
        (r"\ud800", "no character"),
    ],
)
def test_what_can_not_be_honoured_is_refused(pattern: str, message: str) -> None:
    with pytest.raises(RegexError, match=message):
        to_ebnf(pattern)


def test_a_character_that_json_can_not_hold_is_refused() -> None:
    with pytest.raises(RegexError, match="no character that JSON strings hold"):
        to_json_ebnf(r"\x05")
