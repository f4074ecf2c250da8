from typing import Any

import pytest

from pagoda.v1.inference_pb2 import Chat, ChatMessage, Tool, ToolCall
from router.chat import read_chat
from router.errors import RequestError

USER = ChatMessage(role="user", content="hi")


def chat(**fields: Any) -> Chat:
    return Chat(messages=[USER], **fields)


def called(**fields: Any) -> Chat:
    call = ToolCall(**({"id": "1", "name": "f", "arguments": "{}"} | fields))
    return Chat(messages=[USER, ChatMessage(role="assistant", tool_calls=[call])])


def test_messages_have_only_the_keys_that_they_need() -> None:
    assert read_chat(chat(), "chat").messages == [{"role": "user", "content": "hi"}]


def test_calls_and_results_are_as_templates_take_them() -> None:
    call = ToolCall(id="c1", name="f", arguments='{"a": {"b": [1]}}')
    given = Chat(
        messages=[
            USER,
            ChatMessage(role="assistant", tool_calls=[call]),
            ChatMessage(role="tool", content="42", tool_call_id="c1", name="f"),
        ]
    )
    function = {"name": "f", "arguments": {"a": {"b": [1]}}}
    assert read_chat(given, "chat").messages[1:] == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "42", "tool_call_id": "c1", "name": "f"},
    ]


def test_tools_are_functions_with_a_schema() -> None:
    tools = [
        Tool(name="now"),
        Tool(name="add", description="Adds.", parameters='{"type": "object", "properties": {"a": {}}}'),
    ]
    assert [tool["function"] for tool in read_chat(chat(tools=tools), "chat").tools] == [
        {"name": "now", "description": "", "parameters": {"type": "object", "properties": {}}},
        {
            "name": "add",
            "description": "Adds.",
            "parameters": {"type": "object", "properties": {"a": {}}},
        },
    ]


@pytest.mark.parametrize(
    ("given", "field", "message"),
    [
        (Chat(messages=[USER] * 4097), "messages", "4097 messages, at most 4096"),
        (chat(tools=[Tool(name="f")] * 129), "tools", "129 tools, at most 128"),
        (chat(tools=[Tool(name="f"), Tool(name="")]), "tools[1].name", "'' must be 1 to 64"),
        (chat(tools=[Tool(name="f" * 65)]), "tools[0].name", "must be 1 to 64"),
        (chat(tools=[Tool(name="a b")]), "tools[0].name", "'a b' must be 1 to 64"),
        (chat(tools=[Tool(name="f", parameters="[]")]), "tools[0].parameters", "'.*' must be a JSON object"),
        (chat(tools=[Tool(name="f", parameters="{")]), "tools[0].parameters", "must be a JSON object: "),
        (
            chat(tools=[Tool(name="f", parameters='{"a": NaN}')]),
            "tools[0].parameters",
            "NaN is not a number of JSON",
        ),
        (
            chat(tools=[Tool(name="f", parameters='{"a": ' + "[" * 100_000)]),
            "tools[0].parameters",
            "recursion",
        ),
        (
            chat(tools=[Tool(name="f", parameters='{"a": ' + "9" * 5000 + "}")]),
            "tools[0].parameters",
            "must be a JSON object",
        ),
        (
            chat(tools=[Tool(name="f", parameters=r'{"a": [{"b": "\ud800"}]}')]),
            "tools[0].parameters.a[0].b",
            "half of a surrogate pair",
        ),
        (chat(template_arguments=r'{"\udfff": 1}'), r"template_arguments.\udfff", "half of a surrogate pair"),
        (called(name="f g"), "messages[1].tool_calls[0].name", "'f g' must be 1 to 64"),
        (called(arguments=""), "messages[1].tool_calls[0].arguments", "'' must be a JSON object"),
        (called(arguments='"{}"'), "messages[1].tool_calls[0].arguments", "must be a JSON object"),
        (chat(template_arguments="1"), "template_arguments", "'1' must be a JSON object"),
        (chat(template_arguments='{"tools": []}'), "template_arguments", "'tools' is not for clients"),
        (chat(template_arguments='{"bos_token": ""}'), "template_arguments", "'bos_token' is not"),
        (
            chat(template_arguments='{"add_generation_prompt": false}'),
            "template_arguments",
            "'add_generation_prompt' is not",
        ),
    ],
)
def test_what_is_at_fault_is_named(given: Chat, field: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        read_chat(given, "spec.chat")
    assert caught.value.field == f"spec.chat.{field}"
