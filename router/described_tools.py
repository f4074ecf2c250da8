"""Tools for a model whose chat template has no word of them: a system message explains the hermes format."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

_DESCRIPTION: Final = """\
You can call functions. Here they are, one JSON object a line, each with a JSON schema of its parameters:
<tools>
{tools}
</tools>
To call one, write its name and arguments as a JSON object between tags, like this:
<tool_call>
{{"name": "the function's name", "arguments": {{"a parameter": "its value"}}}}
</tool_call>
Write as many of these as you need calls, and wait for the results: they follow between <tool_response> and \
</tool_response>. Where no function helps, just answer."""


def takes_tools(chat_template: str) -> bool:
    """Whether a template shows tools by itself."""
    return "tools" in chat_template


def describe(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """`messages` for a template that knows roles and contents alone.

    Tools join the system message, calls the content of their assistant, and results are a user's message.
    """
    described: list[dict[str, Any]] = []
    previous = ""
    for message in messages:
        given = dict(message)
        if calls := given.pop("tool_calls", None):
            written = [
                _tagged("tool_call", json.dumps(call["function"], ensure_ascii=False)) for call in calls
            ]
            given["content"] = "\n".join([given["content"], *written]).lstrip("\n")
        if given["role"] == "tool":
            response = _tagged("tool_response", given["content"])
            if previous == "tool":
                described[-1]["content"] += f"\n{response}"
            else:
                described.append({"role": "user", "content": response})
        else:
            described.append(given)
        previous = given["role"]
    if tools:
        lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        description = _DESCRIPTION.format(tools=lines)
        if described[0]["role"] == "system":
            described[0]["content"] = f"{described[0]['content']}\n\n{description}"
        else:
            described.insert(0, {"role": "system", "content": description})
    return described


def _tagged(tag: str, text: str) -> str:
    return f"<{tag}>\n{text}\n</{tag}>"
