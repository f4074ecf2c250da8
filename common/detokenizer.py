"""Token ids to text, one token at a time.

A decoder in tokenizer.json maps tokens to bytes, and bytes to text. Both halves are done here per token,
so that each costs the same however long the text is, and at most three bytes (the beginning of one
character) are ever held back.
"""

import codecs
import json
import re
from typing import Any, Final

import tokenizers

_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"
_BYTE_TOKEN: Final = re.compile("<0x[0-9A-Fa-f]{2}>")


class UnsupportedDecoderError(ValueError):
    """tokenizer.json names a decoder that isn't known here."""


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)  # noqa: S101
    return _REPLACEMENT * (error.end - error.start), error.end


# ByteLevel replaces an incomplete character as a whole, ByteFallback each of its bytes.
codecs.register_error("pagoda-replace-each-byte", _replace_each_byte)
_Utf8Decoder: Final = codecs.getincrementaldecoder("utf-8")


def _byte_level_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level BPE's tokens stands for (GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    shifted = {chr(256 + offset): byte for offset, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | shifted


class TokenDecoder:
    """The bytes of each token, as one tokenizer's decoder has them. Shared by all requests.

    Attributes:
        special: The special tokens by token id.

    Known decoders: ByteLevel; Metaspace; and Replace, ByteFallback, Fuse, Strip in this order (the
    SentencePiece conversions of Llama, Mistral and Gemma).
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        """Reads the decoder.

        Raises:
            UnsupportedDecoderError: it is none of the known ones.
        """
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.special = {token_id: token.content for token_id, token in added.items() if token.special}
        self._cache: dict[int, bytes] = {}
        self._alphabet: dict[str, int] = {}
        self._byte_fallback = False
        self._replacements: list[tuple[str, str]] = []
        # What the first token loses of its text, and what the whole text loses at its start.
        self.drop_from_first = ""
        self.strip_content, self.strip_count = "", 0
        self._read(tokenizer.decoder)
        self.errors = "replace" if self._alphabet else "pagoda-replace-each-byte"

    def _read(self, decoder: Any) -> None:
        if decoder is None:
            raise UnsupportedDecoderError("has no decoder")
        steps = _flatten(json.loads(decoder.__getstate__()))
        names = [step["type"] for step in steps]
        order = ["Replace", "ByteFallback", "Fuse", "Strip"]
        known = names in (["ByteLevel"], ["Metaspace"]) or (
            set(names) <= set(order)
            and names == sorted(names, key=order.index)
            and ("Strip" not in names or ("Fuse" in names and names.count("Strip") == 1))
        )
        if not known:
            raise UnsupportedDecoderError(f"decoder {' + '.join(names)} isn't supported")
        for step in steps:
            match step:
                case {"type": "ByteLevel"}:
                    self._alphabet = _byte_level_alphabet()
                case {"type": "Metaspace", "replacement": mark, "prepend_scheme": scheme}:
                    self._replacements.append((mark, " "))
                    self.drop_from_first = "" if scheme == "never" else mark
                case {"type": "Replace", "pattern": {"String": old}, "content": new}:
                    self._replacements.append((old, new))
                case {"type": "ByteFallback"}:
                    self._byte_fallback = True
                case {"type": "Strip", "content": content, "start": start, "stop": 0}:
                    self.strip_content, self.strip_count = content, start
                case {"type": "Fuse"}:
                    pass
                case _:
                    raise UnsupportedDecoderError(f"decoder step {json.dumps(step)} isn't supported")

    def token(self, token_id: int) -> str | None:
        """The token as the vocabulary writes it; None for special and unknown ones, which have no text."""
        return None if token_id in self.special else self._tokenizer.id_to_token(token_id)

    def bytes_of(self, token_id: int) -> bytes:
        """What the token adds to a text that has begun."""
        cached = self._cache.get(token_id)
        if cached is None:
            token = self.token(token_id)
            cached = self._cache[token_id] = b"" if token is None else self.encode(token)
        return cached

    def encode(self, token: str) -> bytes:
        """The bytes that a token of the vocabulary stands for."""
        if self._alphabet:
            values = [self._alphabet.get(character, -1) for character in token]
            return token.encode() if -1 in values else bytes(values)
        if self._byte_fallback and _BYTE_TOKEN.fullmatch(token):
            return bytes.fromhex(token[3:5])
        for old, new in self._replacements:
            token = token.replace(old, new)
        return token.encode()


def _flatten(step: dict[str, Any]) -> list[dict[str, Any]]:
    if step["type"] != "Sequence":
        return [step]
    return [inner for child in step["decoders"] for inner in _flatten(child)]


class Detokenizer:
    """One output's text so far."""

    def __init__(self, decoder: TokenDecoder, shown: frozenset[str] = frozenset()) -> None:
        """Special tokens have no text, but for those that are to be `shown`."""
        self._decoder = decoder
        self._shown = shown
        self._utf8 = _Utf8Decoder(decoder.errors)
        self._first = bool(decoder.drop_from_first)
        self._to_strip = decoder.strip_count

    def push(self, token_id: int) -> str:
        """The text that is certain now: whole characters, never half of one."""
        if (special := self._decoder.special.get(token_id)) in self._shown:
            return self._utf8.decode(special.encode())
        if self._first:
            token = self._decoder.token(token_id)
            if token is None:
                return ""
            self._first = False
            return self._utf8.decode(self._decoder.encode(token.replace(self._decoder.drop_from_first, "")))
        text = self._utf8.decode(self._decoder.bytes_of(token_id))
        return self._strip(text) if self._to_strip else text

    def flush(self) -> str:
        """What the end of the output makes certain: replacement characters for half a character."""
        return self._strip(self._utf8.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        while self._to_strip and text:
            if not text.startswith(self._decoder.strip_content):
                self._to_strip = 0
                break
            text = text.removeprefix(self._decoder.strip_content)
            self._to_strip -= 1
        return text
