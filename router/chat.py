"""A client's chat, checked, in the form that Hugging Face's chat templates take."""

from dataclasses import dataclass
from typing import Any, Final

from common import strict_json
from pagoda.v1.inference_pb2 import Chat, ChatMessage, Tool, ToolCall
from router.chat_template import RESERVED
from router.errors import invalid
from router.text import check_text
from router.tool_call_parser import TOOL_NAME

MAX_MESSAGES: Final = 4096
MAX_TOOLS: Final = 128

_NO_PARAMETERS: Final = '{"type": "object", "properties": {}}'


@dataclass(frozen=True)
class TemplateInput:
    """The variables of a template that come from its client, as JSON has them."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    arguments: dict[str, Any]


def read_chat(chat: Chat, field: str) -> TemplateInput:
    """Checks all of `chat` but its size.

    Raises:
        RequestError: on the first part at fault, by its path from `field`.
    """
    where = f"{field}.messages"
    if not chat.messages:
        raise invalid(where, "is empty; give at least one message", "EMPTY_PROMPT")
    if len(chat.messages) > MAX_MESSAGES:
        raise invalid(where, f"{len(chat.messages)} messages, at most {MAX_MESSAGES} are taken")
    if len(chat.tools) > MAX_TOOLS:
        raise invalid(f"{field}.tools", f"{len(chat.tools)} tools, at most {MAX_TOOLS} are taken")
    arguments = _object(chat.template_arguments or "{}", f"{field}.template_arguments")
    if shadowed := RESERVED.intersection(arguments):
        raise invalid(f"{field}.template_arguments", f"{min(shadowed)!r} is not for clients to set")
    return TemplateInput(
        [_message(message, f"{where}[{index}]") for index, message in enumerate(chat.messages)],
        [_tool(tool, f"{field}.tools[{index}]") for index, tool in enumerate(chat.tools)],
        arguments,
    )


def _message(given: ChatMessage, field: str) -> dict[str, Any]:
    """Keys that a message has no use for are absent: some templates go by their presence alone."""
    if not given.role:
        raise invalid(f"{field}.role", 'is empty; name one, such as "user"')
    message: dict[str, Any] = {"role": given.role, "content": given.content}
    if given.tool_calls:
        message["tool_calls"] = [
            _call(call, f"{field}.tool_calls[{index}]") for index, call in enumerate(given.tool_calls)
        ]
    if given.tool_call_id:
        message["tool_call_id"] = given.tool_call_id
    if given.name:
        message["name"] = given.name
    return message


def _call(given: ToolCall, field: str) -> dict[str, Any]:
    arguments = _object(given.arguments, f"{field}.arguments")
    function = {"name": _name(given.name, f"{field}.name"), "arguments": arguments}
    return {"id": given.id, "type": "function", "function": function}


def _tool(given: Tool, field: str) -> dict[str, Any]:
    function = {
        "name": _name(given.name, f"{field}.name"),
        "description": given.description,
        "parameters": _object(given.parameters or _NO_PARAMETERS, f"{field}.parameters"),
    }
    return {"type": "function", "function": function}


def _name(given: str, field: str) -> str:
    if not TOOL_NAME.fullmatch(given):
        raise invalid(field, f"{given[:100]!r} must be 1 to 64 letters, digits, '_', '.' or '-'")
    return given


def _object(text: str, field: str) -> dict[str, Any]:
    try:
        value = strict_json.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid(field, f"{text[:100]!r} must be a JSON object: {error}") from error
    if not isinstance(value, dict):
        raise invalid(field, f"{text[:100]!r} must be a JSON object")
    check_text(value, field)
    return value
