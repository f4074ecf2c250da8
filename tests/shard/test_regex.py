"""Patterns: what they allow is what `re` matches, and what can't be honoured is refused."""

import json
import random
import re

import pytest
import xgrammar

from shard.regex import RegexError, checked, in_json_string

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

    found = texts(xgrammar.Grammar.from_regex(checked(pattern)), 30)

    assert found
    assert all(expected.search(text) for text in found)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_values_of_json_strings_match_the_pattern(pattern: str) -> None:
    expected = re.compile(pattern.replace(r"\u{1F600}", "😀"), re.ASCII)
    schema = json.dumps({"type": "string", "pattern": f"^(?:{in_json_string(pattern)})$"})

    found = texts(xgrammar.Grammar.from_json_schema(schema), 30)

    assert found
    assert all(expected.search(json.loads(text)) for text in found)


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
        ("[z-a]", "no order"),
        (r"[\d-z]", "no order"),
        ("\\", "isn't supported"),
        (r"\ud800", "no character"),
    ],
)
def test_what_can_not_be_honoured_is_refused(pattern: str, message: str) -> None:
    with pytest.raises(RegexError, match=message):
        checked(pattern)


def test_a_character_that_json_can_not_hold_is_refused() -> None:
    with pytest.raises(RegexError, match="no character that JSON strings hold"):
        in_json_string(r"\x05")
