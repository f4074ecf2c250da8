"""Chat messages to prompt text, by the model's own Jinja template, as `transformers` renders it."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.model_files import SPECIAL_TOKENS, ModelFiles, ModelFilesError
from router.described_tools import takes_tools

# What a template is given by us.
RESERVED: Final = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", *SPECIAL_TOKENS}
)
# Ends the message to continue; its trailing space shows whether the template strips messages.
_CONTINUE_MARK: Final = "PAGODA_CONTINUE_FINAL_MESSAGE "


class ChatTemplateError(ValueError):
    """The template rejects these messages; the message is the template's own."""


class _Generation(Extension):
    """`{% generation %}` marks the model's answers for training; here its body is just rendered."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(lineno)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own escapes HTML.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class ChatTemplate:
    """A compiled template, sandboxed. Thread-safe.

    Attributes:
        takes_tools: It shows tools, and what is called, to the model.
    """

    def __init__(self, files: ModelFiles) -> None:
        """Compiles the template of a model folder that has one.

        Raises:
            ModelFilesError: it isn't a Jinja template.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(files.chat_template or "")
        except jinja2.TemplateError as error:
            raise ModelFilesError(f"{files.chat_template_file}: chat template: {error}") from error
        self._special_tokens = files.special_tokens
        self.takes_tools = takes_tools(files.chat_template or "")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        max_bytes: int,
        tools: Sequence[Mapping[str, Any]] | None = None,
        arguments: Mapping[str, Any] = MappingProxyType({}),
        continue_final_message: bool = False,
    ) -> str:
        """The prompt; it opens an answer unless it continues the last message.

        `arguments` are further variables; none may be named in `RESERVED`.

        Raises:
            ChatTemplateError: the template rejects the messages, or writes more than `max_bytes` of UTF-8.
        """
        chat = [dict(message) for message in messages]
        if continue_final_message:
            chat[-1]["content"] += _CONTINUE_MARK
        variables = {
            **arguments,
            **self._special_tokens,
            "messages": chat,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": not continue_final_message,
        }
        text = self._render(variables, max_bytes)
        return _cut_at_mark(text) if continue_final_message else text

    def _render(self, variables: Mapping[str, Any], max_bytes: int) -> str:
        parts: list[str] = []
        size = 0
        try:
            for part in self._template.generate(variables):
                parts.append(part)
                size += len(part.encode())
                if size > max_bytes:
                    raise ChatTemplateError(f"the chat template writes more than {max_bytes} bytes")
        except ChatTemplateError:
            raise
        except Exception as error:  # a template can raise whatever Python's operators do
            raise ChatTemplateError(f"the chat template failed: {error}") from error
        return "".join(parts)


def _cut_at_mark(text: str) -> str:
    start = text.rfind(_CONTINUE_MARK.strip())
    if start < 0:
        raise ChatTemplateError("the chat template drops the end of the final message: it can't be continued")
    kept = text[:start]
    return kept if text.startswith(_CONTINUE_MARK, start) else kept.rstrip()
