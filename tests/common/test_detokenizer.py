import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders

from common.detokenizer import Detokenizer, TokenDecoder, UnsupportedDecoderError
from tests.router.models import byte_level_bpe, sentencepiece_bpe

BYTE_LEVEL = byte_level_bpe()
SENTENCEPIECE = sentencepiece_bpe()
METASPACE = sentencepiece_bpe(metaspace=True)
TOKENIZERS = {"byte-level": BYTE_LEVEL, "sentencepiece": SENTENCEPIECE, "metaspace": METASPACE}

# Emoji with modifiers and joiners, CJK, combining marks, controls, all planes.
TEXTS = st.one_of(
    st.text(),
    st.text(alphabet=list("é你好世界🙂👍🏽‍👩e\u0301\u200d \n▁Ġ�a<0xE4>")),
    st.sampled_from(["  two spaces", " lead", "trail ", "▁▁", "<tool call>日本"]),
)


def pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(TokenDecoder(tokenizer))
    return [*map(detokenizer.push, ids), detokenizer.flush()]


def by_byte_runs(tokenizer: Tokenizer, ids: list[int]) -> str:
    """What tokenizer.decode gives, but a bad byte doesn't spoil the good characters beside it.

    The library replaces every byte of a run of byte tokens when any of them is bad; a stream has sent
    the characters before the bad byte long ago.
    """
    text, run = "", b""
    tokens = [tokenizer.id_to_token(i) for i in ids if i > 2]
    for token in [*tokens, None]:
        if token is not None and re.fullmatch("<0x[0-9A-F]{2}>", token):
            run += bytes.fromhex(token[3:5])
            continue
        while run:
            try:
                text, run = text + run.decode(), b""
            except UnicodeDecodeError as error:
                text += run[: error.start].decode() + "�" * (error.end - error.start)
                run = run[error.end :]
        text += (token or "").replace("▁", " ")
    return text.removeprefix(" ")


def test_special_tokens_that_are_shown_have_their_text() -> None:
    detokenizer = Detokenizer(TokenDecoder(BYTE_LEVEL), frozenset({"<s>"}))
    ids = BYTE_LEVEL.encode("<s>é<|im_end|><s>").ids
    assert "".join(map(detokenizer.push, ids)) == "<s>é<s>"


@given(st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() + 5), max_size=40))
def test_byte_level_on_random_tokens_equals_decode(ids: list[int]) -> None:
    assert "".join(pieces(BYTE_LEVEL, ids)) == BYTE_LEVEL.decode(ids, skip_special_tokens=True)


@given(
    st.lists(
        st.sampled_from(
            sorted(
                i for t, i in BYTE_LEVEL.get_vocab().items() if len(t) == 1 and (ord(t) > 0xC0 or t in "©¦ª")
            )
        ),
        max_size=20,
    )
)
def test_byte_level_on_broken_utf8_equals_decode_and_holds_at_most_three_tokens(ids: list[int]) -> None:
    parts = pieces(BYTE_LEVEL, ids)
    assert "".join(parts) == BYTE_LEVEL.decode(ids, skip_special_tokens=True)
    for start in range(len(ids) - 3):
        assert any(parts[start : start + 4])


@given(st.lists(st.integers(0, SENTENCEPIECE.get_vocab_size() + 5), max_size=40))
def test_sentencepiece_on_random_tokens_equals_decode_by_byte_runs(ids: list[int]) -> None:
    known = [i for i in ids if SENTENCEPIECE.id_to_token(i) is not None]
    assert "".join(pieces(SENTENCEPIECE, ids)) == by_byte_runs(SENTENCEPIECE, known)


@given(st.lists(st.integers(259, SENTENCEPIECE.get_vocab_size() - 1), max_size=40))
@pytest.mark.parametrize("name", ["sentencepiece", "metaspace"])
def test_without_byte_tokens_equals_decode(name: str, ids: list[int]) -> None:
    tokenizer = TOKENIZERS[name]
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids, skip_special_tokens=True)


@given(TEXTS)
@pytest.mark.parametrize("name", ["byte-level", "sentencepiece"])
def test_on_text_equals_decode(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids, skip_special_tokens=True)


@given(TEXTS)
def test_never_gives_half_a_character(text: str) -> None:
    ids = BYTE_LEVEL.encode(text).ids
    emitted = ""
    for part in pieces(BYTE_LEVEL, ids):
        emitted += part
        assert text.startswith(emitted)


def test_prefix_of_an_emoji_is_held_until_it_is_whole() -> None:
    ids = SENTENCEPIECE.encode("🙂").ids[-4:]
    assert pieces(SENTENCEPIECE, ids) == ["", "", "", "🙂", ""]


def test_half_an_emoji_at_the_end_is_replaced_by_flush() -> None:
    ids = BYTE_LEVEL.encode("ok🙂").ids[:-2]
    assert "".join(pieces(BYTE_LEVEL, ids)[:-1]) == "ok"
    assert pieces(BYTE_LEVEL, ids)[-1] == "�"


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.WordPiece(),
        decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()]),
        decoders.Strip(content=" ", left=1, right=0),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(content=" ", left=0, right=1)]),
    ],
)
def test_unknown_decoders_are_refused(decoder: decoders.Decoder | None) -> None:
    tokenizer = byte_level_bpe()
    tokenizer.decoder = decoder
    with pytest.raises(UnsupportedDecoderError, match="decoder"):
        TokenDecoder(tokenizer)


def test_smollm2_on_text_and_random_tokens_equals_decode(smollm2: Any) -> None:
    tokenizer: Tokenizer = smollm2.backend_tokenizer

    @given(st.one_of(TEXTS.map(lambda text: tokenizer.encode(text).ids), st.lists(st.integers(0, 49151))))
    def check(ids: list[int]) -> None:
        assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids, skip_special_tokens=True)

    check()
