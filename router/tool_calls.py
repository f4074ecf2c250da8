"""The formats in which models write tool calls in an output's text."""

import re
from collections.abc import Callable, Mapping
from typing import Final

from router.described_tools import takes_tools
from router.tool_call_parser import (
    TOOL_NAME,
    CallArguments,
    CallStart,
    Content,
    NoCallError,
    Part,
    Reading,
    ToolCallParser,
)

__all__ = [
    "FORMATS",
    "TAGS",
    "CallArguments",
    "CallStart",
    "Content",
    "Part",
    "ToolCallParser",
    "detect",
    "parser_for",
    "parser_of_arguments",
    "parser_of_array",
]

_NAME_RUN: Final = re.compile(r"[A-Za-z0-9_.-]*")


def _hermes(text: ToolCallParser) -> Reading[None]:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, anywhere in the text."""
    while True:
        try:
            yield from text.content_until("<tool_call>")
            yield from text.call_object()
            yield from text.drop_space()
            yield from text.expect("</tool_call>")
            yield from text.drop_space()
        except NoCallError:
            text.give_back()


def _llama3_json(text: ToolCallParser) -> Reading[None]:
    """`{"name": ..., "parameters": {...}}`, several separated by `;`, and nothing else in the text."""
    try:
        if (yield from text.peek_word()) == "<":
            yield from text.expect("<|python_tag|>")
        while True:
            yield from text.call_object()
            yield from text.drop_space()
            yield from text.expect(";")
    except NoCallError:
        text.give_back()
    yield from text.all_content()


def _mistral(text: ToolCallParser) -> Reading[None]:
    """`[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`, or `[TOOL_CALLS]name{...}` for each call.

    Between name and arguments there may stand `[CALL_ID]id` and `[ARGS]`.
    """
    while True:
        try:
            yield from text.content_until("[TOOL_CALLS]")
            if (yield from text.peek_word()) == "[":
                yield from _call_array(text)
            else:
                yield from _mistral_named_call(text)
            yield from text.drop_space()
        except NoCallError:
            text.give_back()


def _call_array(text: ToolCallParser) -> Reading[None]:
    yield from text.expect("[")
    yield from text.call_object()
    while (yield from text.peek_word()) == ",":
        yield from text.expect(",")
        yield from text.call_object()
    yield from text.expect("]")


def _mistral_named_call(text: ToolCallParser) -> Reading[None]:
    name = yield from text.run(_NAME_RUN)
    if not TOOL_NAME.fullmatch(name):
        raise NoCallError
    if (yield from text.peek()) == "[":
        yield from text.expect("[")
        if (yield from text.peek()) == "C":
            yield from text.expect("CALL_ID]")
            yield from text.run(_NAME_RUN)
            yield from text.expect("[")
        yield from text.expect("ARGS]")
    if (yield from text.peek_word()) != "{":
        raise NoCallError
    yield from text.call_arguments(name)


_GRAMMARS: Final[Mapping[str, Callable[[ToolCallParser], Reading[None]]]] = {
    "hermes": _hermes,
    "llama3_json": _llama3_json,
    "mistral": _mistral,
}
FORMATS: Final = tuple(_GRAMMARS)
# The tags of each format. A tokenizer may have them as special tokens.
TAGS: Final[Mapping[str, frozenset[str]]] = {
    "hermes": frozenset({"<tool_call>", "</tool_call>"}),
    "llama3_json": frozenset({"<|python_tag|>"}),
    "mistral": frozenset({"[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"}),
}


def parser_for(name: str) -> ToolCallParser:
    """A parser at the start of a text, for one of `FORMATS`."""
    return ToolCallParser(_GRAMMARS[name])


def detect(chat_template: str | None) -> str | None:
    """The format that a model's template teaches it; None where there is no template or none of `FORMATS`.

    A template without a word of tools has them described in the hermes format.
    """
    if chat_template is None:
        return None
    if not takes_tools(chat_template):
        return "hermes"
    if "[TOOL_CALLS]" in chat_template:
        return "mistral"
    if "<tool_call>" in chat_template:
        # With the same tag, but XML inside (Qwen3-Coder).
        return None if "<function=" in chat_template else "hermes"
    if "<|python_tag|>" in chat_template or '"parameters": dictionary' in chat_template:
        return "llama3_json"
    return None


def parser_of_arguments(name: str) -> ToolCallParser:
    """A parser of a text that is nothing but the arguments of a call of `name`."""

    def grammar(text: ToolCallParser) -> Reading[None]:
        try:
            yield from text.peek_word()
            yield from text.call_arguments(name)
            yield from text.drop_space()
        except NoCallError:
            text.give_back()
        yield from text.all_content()

    return ToolCallParser(grammar)


def parser_of_array() -> ToolCallParser:
    """A parser of a text that is a JSON array of `{"name": ..., "arguments": {...}}`."""
    return ToolCallParser(_array)


def _array(text: ToolCallParser) -> Reading[None]:
    try:
        yield from text.peek_word()
        yield from _call_array(text)
        yield from text.drop_space()
    except NoCallError:
        text.give_back()
    yield from text.all_content()
