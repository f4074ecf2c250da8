"""Regular expressions of constraints: ECMAScript's syntax, as far as a grammar can follow it.

A pattern says what the whole text is, so `^` and `$` may stand at its ends and change nothing. What a grammar
can't honour (look-around, back-references, word boundaries) is refused. xgrammar 0.2 reads patterns, too, but
skips some of that, and in strings of JSON lets a text enter an optional group in its middle.
"""

import re
from bisect import bisect_right
from collections.abc import Sequence
from typing import Final

Ranges = Sequence[tuple[int, int]]
"""Code points, first and last of each run; sorted and apart."""


class RegexError(ValueError):
    """A pattern that can't be honoured; the message says what of it, and where."""


def _union(ranges: Ranges) -> Ranges:
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return merged


def _complement(ranges: Ranges) -> Ranges:
    """All other characters; surrogates are none."""
    edges = [0]
    for first, last in _union([*ranges, (0xD800, 0xDFFF)]):
        edges += [first - 1, last + 1]
    edges.append(0x10FFFF)
    return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a <= b]


_DIGITS: Final = [(0x30, 0x39)]
_WORD: Final = _union([*_DIGITS, (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)])
# ECMA-262, WhiteSpace and LineTerminator.
_SPACES: Final = _union(
    [
        (0x09, 0x0D),
        (0x2000, 0x200A),
        *((ord(c), ord(c)) for c in " \xa0\u1680\u2028\u2029\u202f\u205f\u3000\ufeff"),
    ]
)
_CLASSES: Final[dict[str, Ranges]] = {
    "d": _DIGITS,
    "D": _complement(_DIGITS),
    "w": _WORD,
    "W": _complement(_WORD),
    "s": _SPACES,
    "S": _complement(_SPACES),
}
_DOT: Final = _complement([(0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)])
_CONTROLS: Final = {"n": 0x0A, "t": 0x09, "r": 0x0D, "f": 0x0C, "v": 0x0B, "0": 0x00}
_HEX: Final = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]{1,6})\}")
_QUANTIFIER: Final = re.compile(r"[*+?]|\{(\d+)(,(\d*))?\}")
# Characters that JSON has an escape of two characters for.
_ESCAPED: Final = {ord(c): e for c, e in zip('"\\\b\f\n\r\t', '"\\bfnrt', strict=True)}
_BACKSLASH: Final = (0x5C, 0x5C)
_NOT_IN_JSON: Final = _complement([(0x00, 0x1F), (0x22, 0x22), _BACKSLASH])

_UTF8_LENGTHS: Final = ((0, 0x7F), (0x80, 0x7FF), (0x800, 0xFFFF), (0x10000, 0x10FFFF))

MAX_REPEATS: Final = 10_000


def to_ebnf(pattern: str) -> str:
    """An expression of xgrammar's EBNF for what matches `pattern`.

    Raises:
        RegexError: it can't be honoured.
    """
    return _Translation(pattern, in_json=False).run()


def to_json_ebnf(pattern: str) -> str:
    """An expression for what stands between the quotes of a JSON string whose value matches `pattern`.

    Raises:
        RegexError: it can't be honoured.
    """
    return _Translation(pattern, in_json=True).run()


def _one_of(ranges: Ranges, in_json: bool) -> str:
    """An expression for one character of `ranges`, or for how JSON writes it; empty if there is none."""
    if not in_json:
        return _class(ranges)
    plain = [
        (max(first, low), min(last, high))
        for first, last in ranges
        for low, high in _NOT_IN_JSON
        if max(first, low) <= min(last, high)
    ]
    starts = [first for first, _ in ranges]
    escapes: list[tuple[int, int]] = []
    for point, letter in _ESCAPED.items():
        index = bisect_right(starts, point) - 1
        if index >= 0 and point <= ranges[index][1]:
            escapes.append((ord(letter), ord(letter)))
    if not escapes:
        return _class(plain) if plain else ""
    escaped = f"{_class([_BACKSLASH])} {_class(escapes)}"
    return f"({_class(plain)} | {escaped})" if plain else f"({escaped})"


def _class(ranges: Ranges) -> str:
    """One bracket for each length in UTF-8: from mixed ones xgrammar 0.2 makes broken encodings."""
    brackets = []
    for low, high in _UTF8_LENGTHS:
        runs = [(max(a, low), min(b, high)) for a, b in ranges if a <= high and b >= low]
        if runs:
            brackets.append("".join(_point(a) if a == b else f"{_point(a)}-{_point(b)}" for a, b in runs))
    classes = " | ".join(f"[{bracket}]" for bracket in brackets)
    return f"({classes})" if len(brackets) > 1 else classes


def _point(point: int) -> str:
    return chr(point) if chr(point).isascii() and chr(point).isalnum() else rf"\U{point:08x}"


class _Translation:
    """One pattern on its way from ECMAScript's syntax to EBNF."""

    def __init__(self, pattern: str, in_json: bool) -> None:
        self._pattern = pattern
        self._in_json = in_json
        self._at = 0
        self._out: list[str] = []
        # Whether a quantifier may come now.
        self._repeatable = False

    def run(self) -> str:
        depth = 0
        while self._at < len(self._pattern):
            character = self._pattern[self._at]
            if character == "(":
                depth += 1
                self._open()
            elif character == ")":
                depth -= 1
                if depth < 0:
                    raise self._error("an unmatched )")
                self._end_alternative()
                self._put(")", repeatable=True)
            elif character == "|":
                self._end_alternative()
                self._put("|", repeatable=False)
            elif character in "^$":
                self._anchor(character, depth)
            elif character in "*+?{":
                self._quantifier()
            elif character in "}]":
                raise self._error(f"a lone {character}; write \\{character}")
            else:
                self._characters(self._set())
        if depth:
            raise self._error("an unmatched (")
        self._end_alternative()
        return " ".join(self._out)

    def _error(self, what: str) -> RegexError:
        return RegexError(f"{what} at character {self._at} of {self._pattern[:100]!r}")

    def _put(self, text: str, repeatable: bool) -> None:
        self._out.append(text)
        self._repeatable = repeatable
        self._at += 1

    def _end_alternative(self) -> None:
        """EBNF has a word for the empty text."""
        if not self._out or self._out[-1] in ("(", "|"):
            self._out.append('""')

    def _open(self) -> None:
        if self._pattern.startswith("(?:", self._at):
            self._at += 2
        elif self._pattern.startswith("(?", self._at):
            raise self._error("look-around, named and other special groups aren't supported:")
        self._put("(", repeatable=False)

    def _anchor(self, character: str, depth: int) -> None:
        neighbour = (
            self._pattern[self._at - 1 : self._at] if character == "^" else self._pattern[self._at + 1 :][:1]
        )
        if depth or neighbour not in ("", "|"):
            raise self._error(f"{character} inside the pattern isn't supported:")
        self._repeatable = False
        self._at += 1

    def _quantifier(self) -> None:
        match = _QUANTIFIER.match(self._pattern, self._at)
        if not match or not self._repeatable:
            raise self._error("nothing to repeat, or a brace that should be \\{,")
        if max(int(match[1] or 0), int(match[3] or 0)) > MAX_REPEATS:
            raise self._error(f"{match[0]} is above the limit of {MAX_REPEATS} repeats")
        if match[3] and int(match[3]) < int(match[1]):
            raise self._error(f"{match[0]} ends before it begins")
        self._out[-1] += match[0]
        self._repeatable = False
        self._at = match.end()
        # A lazy quantifier allows the same texts.
        if self._pattern.startswith("?", self._at):
            self._at += 1

    def _characters(self, ranges: Ranges) -> None:
        one = _one_of(ranges, self._in_json)
        if not one:
            raise self._error("no character that JSON strings hold")
        self._out.append(one)
        self._repeatable = True

    def _set(self) -> Ranges:
        """The characters of the dot, class, escape or literal here."""
        character = self._pattern[self._at]
        if character == "\\":
            return self._escape()
        if character == "[":
            return self._class()
        self._at += 1
        return _DOT if character == "." else [(ord(character), ord(character))]

    def _escape(self) -> Ranges:
        rest = self._pattern[self._at + 1 : self._at + 10]
        letter = rest[:1]
        if match := _HEX.match(rest):
            point = int(match[1] or match[2] or match[3], 16)
            if point > 0x10FFFF or 0xD800 <= point <= 0xDFFF:
                raise self._error("a code point that is no character")
            self._at += 1 + match.end()
            return [(point, point)]
        if letter in _CLASSES:
            ranges = _CLASSES[letter]
        elif letter in _CONTROLS and not (letter == "0" and rest[1:2].isdigit()):
            ranges = [(_CONTROLS[letter], _CONTROLS[letter])]
        elif letter and not letter.isalnum():
            ranges = [(ord(letter), ord(letter))]
        else:
            raise self._error(f"\\{letter} isn't supported:")
        self._at += 2
        return ranges

    def _class(self) -> Ranges:
        self._at += 1
        negated = self._pattern.startswith("^", self._at)
        self._at += negated
        ranges: list[tuple[int, int]] = []
        while not self._pattern.startswith("]", self._at):
            first = self._class_item()
            if self._pattern.startswith("-", self._at) and self._pattern[self._at + 1 : self._at + 2] != "]":
                self._at += 1
                last = self._class_item()
                if len(first) > 1 or len(last) > 1 or first[0][0] != first[0][1] or first[0] > last[0]:
                    raise self._error("a range of a character class that has no order")
                first = [(first[0][0], last[0][1])]
            ranges += first
        self._at += 1
        union = _union(ranges)
        # Without surrogates.
        chosen = _complement(union) if negated else _complement(_complement(union))
        if not chosen:
            raise self._error("a character class without characters before")
        return chosen

    def _class_item(self) -> Ranges:
        character = self._pattern[self._at : self._at + 1]
        if not character:
            raise self._error("an unmatched [")
        if character == "\\":
            if self._pattern.startswith("\\b", self._at):
                raise self._error("\\b isn't supported:")
            return self._escape()
        self._at += 1
        return [(ord(character), ord(character))]
