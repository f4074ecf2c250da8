import json
from typing import Any

from router.described_tools import describe
from router.tool_calls import CallArguments, CallStart, parser_for
from tests.router.tool_templates import CHAT, TOOLS

USER = {"role": "user", "content": "hi"}


def test_tools_are_in_a_system_message_of_their_own() -> None:
    described = describe([USER], TOOLS)
    assert [message["role"] for message in described] == ["system", "user"]
    lines = described[0]["content"].partition("<tools>\n")[2].partition("\n</tools>")[0].splitlines()
    assert [json.loads(line) for line in lines] == [tool["function"] for tool in TOOLS]


def test_tools_join_the_system_message_that_is_there() -> None:
    system, user = describe([{"role": "system", "content": "Be brief."}, USER], TOOLS)
    assert system["content"].startswith("Be brief.\n\n")
    assert "weather" in system["content"]
    assert user == USER


def test_the_example_is_a_call_to_the_parser() -> None:
    system = describe([USER], TOOLS)[0]["content"]
    example = system[system.index("<tool_call>") : system.index("</tool_call>")]
    assert json.loads(example.removeprefix("<tool_call>")).keys() == {"name", "arguments"}


def test_a_call_is_written_as_the_model_is_to_write_it() -> None:
    written = describe(CHAT, [])[1]
    assert written.keys() == {"role", "content"}
    assert parser_for("hermes").push(written["content"]) == [
        CallStart(0, "weather"),
        CallArguments(0, '{"city": "Köln"}'),
    ]


def test_what_a_message_says_stands_before_its_calls() -> None:
    call = {**CHAT[1], "content": "I look."}
    assert describe([USER, call], [])[1]["content"].startswith("I look.\n<tool_call>\n")


def test_results_in_a_row_are_one_message_of_a_user() -> None:
    result: dict[str, Any] = {"role": "tool", "content": "1"}
    described = describe([USER, result, {**result, "content": "2"}, USER, result], [])
    one, two = "<tool_response>\n1\n</tool_response>", "<tool_response>\n2\n</tool_response>"
    assert [message["content"] for message in described] == ["hi", f"{one}\n{two}", "hi", one]
    assert {message["role"] for message in described} == {"user"}


def test_a_chat_without_tools_is_left_as_it_is() -> None:
    chat = [{"role": "system", "content": "x"}, {**USER, "name": "Ann"}]
    assert describe(chat, []) == chat
