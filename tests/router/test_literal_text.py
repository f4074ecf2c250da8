import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from router.literal_text import LiteralText, pieces
from tests.router.models import byte_level_bpe

TOKENIZER = byte_level_bpe()
SPECIAL = ["<|im_start|>", "<|im_end|>", "<s>"]
LITERAL = LiteralText(SPECIAL)
texts = st.lists(st.sampled_from([*SPECIAL, "<", "|", "im_end", "|>", "s>", "a", "\n", "é"])).map("".join)


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return [token_id for piece in pieces(text) for token_id in tokenizer.encode(piece).ids]


@given(texts)
def test_no_special_token_comes_of_a_clients_text(text: str) -> None:
    found = ids(TOKENIZER, LITERAL.cut(text))
    assert not {0, 1, 2}.intersection(found)
    assert TOKENIZER.decode(found) == text


@given(texts.filter(lambda text: not any(token in text for token in SPECIAL)))
def test_other_texts_are_tokenised_as_ever(text: str) -> None:
    assert ids(TOKENIZER, LITERAL.cut(text)) == TOKENIZER.encode(text).ids


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"<s>": ["<s>", {"a": "b<s>"}]}, {"<|s>": ["<|s>", {"a": "b<|s>"}]}),
        (['"<s>\\u003cs>\n'], ['"<|s>\\u003cs>\n']),
        ([1, None, True, "<"], [1, None, True, "<"]),
    ],
)
def test_every_string_of_a_value_is_cut(value: Any, expected: Any) -> None:
    cut = json.dumps(LiteralText(["<s>"]).cut(value), ensure_ascii=False)
    assert json.loads("|".join(pieces(cut))) == expected


def test_tokens_that_overlap_are_all_cut() -> None:
    assert pieces(LiteralText(["ab", "bc", "abcd"]).cut("abcd")) == ["a", "b", "cd"]


def test_a_tokenizer_without_special_tokens_cuts_nothing() -> None:
    assert pieces(LiteralText([]).cut("<s>")) == ["<s>"]
