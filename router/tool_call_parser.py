"""Takes the tool calls out of an output's text while it streams, by the grammar of their format.

A grammar is a generator that suspends wherever the text ends for now. What it read and didn't give out is
held, and comes back as content once it turns out to be no call. No character is read twice, so a text costs
what its length does, whatever the model writes.
"""

import re
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Final, TypeVar

# What a tool may be called, as its client and as the model names it.
TOOL_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")

_WHITESPACE: Final = " \t\n\r"
_STRING_RUN: Final = re.compile(r'[^"\\\x00-\x1f]*')
_SCALAR_RUN: Final = re.compile(r"[-+.0-9A-Za-z]*")
_SCALAR: Final = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_ESCAPES: Final = '"\\/bfnrtu'
_HEX: Final = "0123456789abcdefABCDEF"

T = TypeVar("T")
# Suspends for more text; returns T.
Reading = Generator[None, None, T]


@dataclass(frozen=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """A call begins. `index` counts the calls of an output from 0."""

    index: int
    name: str


@dataclass(frozen=True)
class CallArguments:
    """More of a call's arguments. Those of a whole call, joined, are the text of one JSON object."""

    index: int
    text: str


Part = Content | CallStart | CallArguments


class NoCallError(Exception):
    """What is held isn't the call that it began like."""


class ToolCallParser:
    """Parses one output's text. How the text is cut into pushes makes no difference to the parts, joined.

    A call that breaks off before its name is known comes back as content. One that breaks off later ends
    there: its arguments are then no whole object, and the rest of it is content.
    """

    def __init__(self, grammar: "Callable[[ToolCallParser], Reading[None]]") -> None:
        # `_text[:_start]` is given out or dropped, `_text[_start:_next]` is held, the rest is to be read.
        self._text = ""
        self._start = 0
        self._next = 0
        self._parts: list[Part] = []
        self._calls = 0
        # What is read belongs to the arguments of the latest call, and nothing of it need be held.
        self._in_arguments = False
        self._reading = grammar(self)
        next(self._reading)

    def push(self, text: str) -> list[Part]:
        """The parts that are certain now."""
        self._text = self._text[self._start :] + text
        self._next -= self._start
        self._start = 0
        next(self._reading)
        if self._in_arguments:
            self._give_arguments()
        return self._take()

    def flush(self) -> list[Part]:
        """What the end of the output makes certain. Nothing is to be pushed after it."""
        self._give_content(len(self._text))
        return self._take()

    def _take(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts

    # Giving out.

    def _give_content(self, end: int) -> None:
        if end > self._start:
            self._parts.append(Content(self._text[self._start : end]))
            self._start = end
        self._next = max(self._next, end)

    def _give_start(self, name: str) -> None:
        self._parts.append(CallStart(self._calls, name))
        self._calls += 1

    def _give_arguments(self) -> None:
        if self._next > self._start:
            self._parts.append(CallArguments(self._calls - 1, self._text[self._start : self._next]))
            self._start = self._next

    def _drop(self) -> None:
        self._start = self._next

    # Reading characters.

    def peek(self) -> Reading[str]:
        """The next character, left where it is."""
        while self._next == len(self._text):
            yield
        return self._text[self._next]

    def peek_word(self) -> Reading[str]:
        """The next character that isn't white space."""
        while (char := (yield from self.peek())) in _WHITESPACE:
            self._next += 1
        return char

    def expect(self, word: str) -> Reading[None]:
        """Reads `word`, which must come next."""
        if not (yield from self.reads(word)):
            raise NoCallError

    def reads(self, word: str) -> Reading[bool]:
        """Reads as much of `word` as comes next; whether that is all of it."""
        for char in word:
            if (yield from self.peek()) != char:
                return False
            self._next += 1
        return True

    def run(self, characters: re.Pattern[str]) -> Reading[str]:
        """Reads what `characters`, a class that may repeat, matches; the text read."""
        pieces: list[str] = []
        while True:
            piece = characters.match(self._text, self._next)[0]  # type: ignore[index]
            pieces.append(piece)
            self._next += len(piece)
            if self._next < len(self._text):
                return "".join(pieces)
            yield

    def held(self, reading: Reading[None]) -> Reading[str]:
        """The text that `reading` reads. It must not give out any."""
        offset = self._next - self._start
        yield from reading
        return self._text[self._start + offset : self._next]

    # Reading JSON (RFC 8259), without recursion: a model may nest as deep as its output is long.

    def json_value(self) -> Reading[None]:
        """Reads one JSON value."""
        closers: list[str] = []
        while True:
            first = yield from self.peek_word()
            if first in "{[":
                self._next += 1
                closers.append("}" if first == "{" else "]")
                if (yield from self.peek_word()) != closers[-1]:
                    if first == "{":
                        yield from self.json_key()
                    continue
            elif first == '"':
                yield from self.json_string()
            elif not _SCALAR.fullmatch((yield from self.run(_SCALAR_RUN))):
                raise NoCallError
            while closers and (yield from self.peek_word()) == closers[-1]:
                self._next += 1
                closers.pop()
            if not closers:
                return
            yield from self.expect(",")
            if closers[-1] == "}":
                yield from self.json_key()

    def json_key(self) -> Reading[None]:
        """Reads a member's name and the colon after it."""
        yield from self.peek_word()
        yield from self.json_string()
        yield from self.peek_word()
        yield from self.expect(":")

    def json_string(self) -> Reading[None]:
        """Reads a string, its quotes included."""
        yield from self.expect('"')
        while True:
            yield from self.run(_STRING_RUN)
            if (yield from self.peek()) == '"':
                self._next += 1
                return
            yield from self.expect("\\")
            escape = yield from self.peek()
            if escape not in _ESCAPES:
                raise NoCallError
            self._next += 1
            for _ in range(4 if escape == "u" else 0):
                if (yield from self.peek()) not in _HEX:
                    raise NoCallError
                self._next += 1

    # Reading calls.

    def content_until(self, tag: str) -> Reading[None]:
        """Reads `tag`, and gives out what comes before it and the white space around it.

        The tag's first character must be in it only once.
        """
        while True:
            before, at = self._next, self._text.find(tag[0], self._next)
            self._next = at if at >= 0 else len(self._text)
            if certain := len(self._text[before : self._next].rstrip(_WHITESPACE)):
                self._give_content(before + certain)
            if at < 0:
                yield
            elif (yield from self.reads(tag)):
                return
            else:
                self.give_back()

    def call_object(self) -> Reading[None]:
        """Reads `{"name": ..., "arguments": {...}}`, whatever its members' order, and gives it out."""
        name, arguments, started = "", "", False
        yield from self.peek_word()
        yield from self.expect("{")
        while True:
            yield from self.peek_word()
            key = yield from self.held(self.json_string())
            yield from self.peek_word()
            yield from self.expect(":")
            first = yield from self.peek_word()
            if key == '"name"':
                value = yield from self.held(self.json_string())
                if name or not TOOL_NAME.fullmatch(value, 1, len(value) - 1):
                    raise NoCallError
                name = value[1:-1]
            elif key in ('"arguments"', '"parameters"'):
                if started or arguments or first != "{":
                    raise NoCallError
                if name:
                    yield from self.call_arguments(name)
                    started = True
                else:
                    arguments = yield from self.held(self.json_value())
            else:
                yield from self.json_value()
            if (yield from self.peek_word()) == "}":
                break
            yield from self.expect(",")
        if not name:
            raise NoCallError
        self._next += 1
        if not started:
            self._give_start(name)
            self._parts.append(CallArguments(self._calls - 1, arguments or "{}"))
        self._drop()

    def call_arguments(self, name: str) -> Reading[None]:
        """Reads the object that comes next as the arguments of a call of `name`, and gives them out."""
        self._give_start(name)
        self._drop()
        self._in_arguments = True
        try:
            yield from self.json_value()
        finally:
            self._in_arguments = False
            self._give_arguments()

    def drop_space(self) -> Reading[None]:
        """Drops white space, between calls or after them."""
        self._drop()
        while (yield from self.peek()) in _WHITESPACE:
            self._next += 1
            self._drop()

    def all_content(self) -> Reading[None]:
        """Gives out everything that comes."""
        while True:
            self._give_content(len(self._text))
            yield

    def give_back(self) -> None:
        """Gives out as content what is held."""
        self._give_content(self._next)
