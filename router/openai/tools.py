"""What a model may or must call, and what it called."""

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from pagoda.v1 import inference_pb2 as pb
from router.errors import invalid
from router.openai.schemas import ChatBody, Function, NamedTool, Tool
from router.tool_calls import (
    CallArguments,
    CallStart,
    Content,
    Part,
    ToolCallParser,
    parser_for,
    parser_of_arguments,
    parser_of_array,
)

MakeParser = Callable[[], ToolCallParser]

# Keywords of JSON schemas whose values are no schemas, and those whose values are schemas by any name.
_DATA: Final = ("const", "default", "enum", "examples")
_BY_NAME: Final = ("$defs", "definitions", "properties")


def to_proto(tools: Sequence[Tool]) -> list[pb.Tool]:
    """As the chat template gets them.

    Raises:
        RequestError: one takes something else than an object.
    """
    for index, tool in enumerate(tools):
        if (tool.function.parameters or {}).get("type", "object") != "object":
            message = "must be the schema of an object, whose type is object"
            raise invalid(f"tools[{index}].function.parameters", message)
    return [
        pb.Tool(
            name=tool.function.name,
            description=tool.function.description or "",
            parameters=json.dumps(tool.function.parameters) if tool.function.parameters else "",
        )
        for tool in tools
    ]


def set_choice(spec: pb.GenerateSpec, body: ChatBody, tool_format: str | None) -> MakeParser | None:
    """Lets the model call as `tool_choice` says; returns what reads its calls, or None if there can't be any.

    `tool_format` is how the model writes calls where it has the choice.

    Raises:
        RequestError: `tool_choice` doesn't go with the rest.
    """
    tools = {tool.function.name: tool.function for tool in body.tools or []}
    choice = body.tool_choice or ("auto" if tools else "none")
    if choice != "none" and not tools:
        raise invalid("tool_choice", "needs tools")
    match choice:
        case "none":
            return None
        case "auto":
            return None if tool_format is None else lambda: parser_for(tool_format)
    if spec.HasField("constraint"):
        raise invalid("tool_choice", "a call that must be made doesn't go with another constraint")
    if isinstance(choice, NamedTool):
        name = choice.function.name
        if name not in tools:
            raise invalid("tool_choice", f"{name[:100]!r} is none of the tools")
        spec.constraint.json_schema = json.dumps(_object(tools[name].parameters))
        return lambda: parser_of_arguments(name)
    try:
        spec.constraint.json_schema = json.dumps(_calls(tools, body.parallel_tool_calls is not False))
    except RecursionError:
        raise invalid("tools", "are nested too deep") from None
    return parser_of_array


def _calls(tools: Mapping[str, Function], parallel: bool) -> dict[str, Any]:
    """The schema of an array of one call or, if `parallel`, of more."""
    # Functions that take the same are one alternative: each makes the grammar slower to compile.
    names: dict[str, list[str]] = {}
    for name, one in tools.items():
        names.setdefault(json.dumps(_object(one.parameters)), []).append(name)
    calls = [
        {
            "type": "object",
            "properties": {"name": {"enum": alike}, "arguments": {"$ref": f"#/$defs/{alike[0]}"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for alike in names.values()
    ]
    schemas = {alike[0]: _moved(json.loads(one), f"#/$defs/{alike[0]}") for one, alike in names.items()}
    array = {"type": "array", "items": {"anyOf": calls}, "minItems": 1, "$defs": schemas}
    return array if parallel else {**array, "maxItems": 1}


class ToolReader:
    """Turns one output's text into the fields of a chat's `delta`."""

    def __init__(self, parser: ToolCallParser | None, parallel: bool) -> None:
        """Without `parallel`, only the first call is given out."""
        self._parser = parser
        self._parallel = parallel
        self.called = False

    def deltas(self, text: str, last: bool) -> list[dict[str, Any]]:
        """What `text` adds, and the end of the output if it is the `last`."""
        if self._parser is None:
            return [{"content": text}] if text else []
        parts = self._parser.push(text)
        if last:
            parts += self._parser.flush()
        return [delta for part in parts for delta in self._delta(part)]

    def _delta(self, part: Part) -> list[dict[str, Any]]:
        match part:
            case Content(text):
                return [{"content": text}]
            case CallStart(index, name) if self._parallel or index == 0:
                self.called = True
                call = {
                    "index": index,
                    "id": f"call_{uuid.uuid4().hex}",
                    "type": "function",
                    "function": {"name": name, "arguments": ""},
                }
                return [{"tool_calls": [call]}]
            case CallArguments(index, text) if self._parallel or index == 0:
                return [{"tool_calls": [{"index": index, "function": {"arguments": text}}]}]
        return []


def joined(deltas: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The message that deltas add up to."""
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        texts.append(delta.get("content", ""))
        for piece in delta.get("tool_calls", ()):
            if "id" in piece:
                calls.append({"id": piece["id"], "type": piece["type"], "function": dict(piece["function"])})
            else:
                calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
    content = "".join(texts)
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if calls:
        message |= {"content": content or None, "tool_calls": calls}
    return message


def _object(parameters: dict[str, Any] | None) -> dict[str, Any]:
    """A function that names no parameters takes none."""
    schema = {"type": "object", **(parameters or {"properties": {}})}
    return {"additionalProperties": False, **schema} if schema.get("properties") == {} else schema


def _moved(schema: Any, place: str) -> Any:
    """A document as it reads where it is but a part of another: its references to itself follow it."""
    if isinstance(schema, list):
        return [_moved(one, place) for one in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {}
    for keyword, value in schema.items():
        if keyword in _DATA:
            moved[keyword] = value
        elif keyword in _BY_NAME and isinstance(value, dict):
            moved[keyword] = {name: _moved(one, place) for name, one in value.items()}
        elif keyword == "$ref" and isinstance(value, str) and value.startswith("#"):
            moved[keyword] = place + value.removeprefix("#")
        else:
            moved[keyword] = _moved(value, place)
    return moved
