"""Tools: what the model may or must call, and what it called."""

import asyncio
import json
from typing import Any

import pytest
import xgrammar
from jsonschema import Draft202012Validator

from pagoda.v1 import inference_pb2 as pb
from pagoda.v1.inference_pb2 import Constraint
from router.errors import RequestError
from router.openai.schemas import ChatBody
from router.openai.tools import MakeParser, ToolReader, joined, set_choice
from shard.grammar_compiler import build
from tests.router.fake_scheduler import STOP, FakeScheduler
from tests.router.openai.conftest import EOS, TOKENIZER, Face, answer, ids

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
TIME = {"type": "function", "function": {"name": "time"}}
MESSAGES: Any = [{"role": "user", "content": "Warm in Oslo?"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


@pytest.fixture
async def face(start_face: Any) -> Face:
    """With room for the description of tools."""
    started: Face = await start_face(schedulers=[FakeScheduler(max_model_len=4096)])
    return started


def chat(face: Face, **fields: Any) -> "asyncio.Task[Any]":
    given: Any = {"model": "tiny", "messages": MESSAGES, "tools": [WEATHER], **fields}
    return asyncio.create_task(face.openai.chat.completions.create(**given))


def chosen(choice: Any, **fields: Any) -> tuple[pb.GenerateSpec, MakeParser | None]:
    """The spec that a `tool_choice` makes, and what reads its calls."""
    spec = pb.GenerateSpec()
    body = {"messages": MESSAGES, "tools": [WEATHER, TIME], "tool_choice": choice, **fields}
    return spec, set_choice(spec, ChatBody.model_validate(body), "hermes")


def read(make_parser: MakeParser | None, *texts: str, parallel: bool = True) -> dict[str, Any]:
    """The message that a text comes to, however it is cut."""
    assert make_parser
    reader = ToolReader(make_parser(), parallel)
    return joined([delta for text in texts for delta in reader.deltas(text, last=text is texts[-1])])


def calls_in(message: Any) -> list[tuple[str, Any]]:
    return [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in message.get("tool_calls", ())
    ]


async def test_calls_are_given_out_as_calls(face: Face) -> None:
    call = chat(face)
    submit = await answer(face, f"Let me see.\n{CALL}\n{CALL}")
    (choice,) = (await call).choices

    assert "weather" in TOKENIZER.decode(submit.prompt_token_ids)
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see.")
    first, second = choice.message.tool_calls
    assert first.type == "function"
    assert first.function.name == second.function.name == "weather"
    assert json.loads(first.function.arguments) == {"city": "Oslo"}
    assert first.id != second.id


async def test_calls_stream_as_they_are_written(face: Face) -> None:
    call = chat(face, stream=True)
    submit = await face.scheduler.accept()
    for token_id in ids(CALL):
        face.scheduler.send(submit, [token_id])
    face.scheduler.send(submit, [EOS], STOP)
    name, arguments, pieces = "", "", 0
    async for chunk in await call:
        last = chunk.choices[0]
        for piece in last.delta.tool_calls or []:
            assert piece.index == 0
            name += piece.function.name or ""
            arguments += piece.function.arguments or ""
            pieces += 1

    assert (name, json.loads(arguments)) == ("weather", {"city": "Oslo"})
    assert last.finish_reason == "tool_calls"
    assert pieces > 2


async def test_where_no_tool_may_be_called_a_call_is_text(face: Face) -> None:
    call = chat(face, tool_choice="none")
    submit = await answer(face, CALL)
    (choice,) = (await call).choices
    assert "weather" not in TOKENIZER.decode(submit.prompt_token_ids)
    assert (choice.finish_reason, choice.message.content) == ("stop", CALL)


def test_only_one_call_is_given_out_where_only_one_may_be() -> None:
    _, make_parser = chosen("auto")
    assert calls_in(read(make_parser, CALL + CALL, parallel=False)) == [("weather", {"city": "Oslo"})]


def test_a_named_function_has_the_whole_output_as_its_arguments() -> None:
    spec, make_parser = chosen({"type": "function", "function": {"name": "weather"}})
    message = read(make_parser, '{"city": ', '"Oslo"}\n')
    assert json.loads(spec.constraint.json_schema) == PARAMETERS
    assert calls_in(message) == [("weather", {"city": "Oslo"})]
    assert message["content"] is None


@pytest.mark.parametrize(
    ("output", "valid"),
    [
        ([{"name": "weather", "arguments": {"city": "Oslo"}}, {"name": "time", "arguments": {}}], True),
        ([], False),
        ([{"name": "weather", "arguments": {}}], False),
        ([{"name": "another", "arguments": {}}], False),
        ([{"name": "time"}], False),
    ],
)
def test_a_required_call_is_one_of_the_tools(output: Any, valid: bool) -> None:
    spec, _ = chosen("required")
    assert Draft202012Validator(json.loads(spec.constraint.json_schema)).is_valid(output) is valid


def test_schemas_refer_to_themselves_wherever_they_stand() -> None:
    """But not what only looks like a reference: a value, or the name of a property."""
    tree = {
        "type": "object",
        "properties": {
            "$ref": {"const": {"$ref": "#"}},
            "enum": {"type": "array", "items": {"$ref": "#/$defs/leaf"}},
            "child": {"$ref": "#"},
        },
        "required": ["$ref"],
        "$defs": {"leaf": {"type": "integer"}},
    }
    grow = {"type": "function", "function": {"name": "grow", "parameters": tree}}
    spec, _ = chosen("required", tools=[WEATHER, grow])
    schema = Draft202012Validator(json.loads(spec.constraint.json_schema))

    inner: dict[str, Any] = {"$ref": {"$ref": "#"}, "enum": [1]}
    for arguments, valid in [
        ({**inner, "child": inner}, True),
        ({**inner, "child": {**inner, "enum": ["x"]}}, False),
        ({"$ref": {"$ref": "#/$defs/grow"}}, False),
    ]:
        assert schema.is_valid([{"name": "grow", "arguments": arguments}]) is valid


@pytest.mark.parametrize("depth", [100, 450, 5_000])
async def test_a_tool_that_is_nested_too_deep_is_refused(face: Face, depth: int) -> None:
    parameters = '{"anyOf": [' * depth + "{}" + "]}" * depth
    tool = f'{{"type": "function", "function": {{"name": "f", "parameters": {parameters}}}}}'
    body = f'{{"messages": [], "tool_choice": "required", "tools": [{tool}]}}'
    headers = {"Content-Type": "application/json"}
    response = await face.http.post("/v1/chat/completions", content=body.encode(), headers=headers)
    assert response.status_code == 400


@pytest.mark.parametrize("parameters", [None, {}, {"type": "object", "properties": {}}, {"properties": {}}])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "now"}}])
def test_a_function_without_parameters_takes_none(parameters: Any, choice: Any) -> None:
    spec, _ = chosen(
        choice, tools=[{"type": "function", "function": {"name": "now", "parameters": parameters}}]
    )
    grammar = build(Constraint(json_schema=spec.constraint.json_schema))

    given = '[{"name": "now", "arguments": {' if choice == "required" else "{"
    letters = sorted({*given, *'}x"'})
    info = xgrammar.TokenizerInfo([*letters, ""], stop_token_ids=[len(letters)])
    matcher = xgrammar.GrammarMatcher(xgrammar.GrammarCompiler(info).compile_grammar(grammar))
    assert all(matcher.accept_token(letters.index(letter)) for letter in given)

    assert [letter for token, letter in enumerate(letters) if matcher.fork().accept_token(token)] == ["}"]


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("kind", ["array", ["object", "null"]])
async def test_parameters_that_are_no_object_are_refused(face: Face, choice: str, kind: Any) -> None:
    takes = {"type": "function", "function": {"name": "f", "parameters": {"type": kind}}}
    error = await face.refused(
        "/v1/chat/completions", messages=MESSAGES, tools=[TIME, takes], tool_choice=choice
    )
    assert error["param"] == "tools[1].function.parameters"


def test_functions_that_take_the_same_are_one_alternative() -> None:
    """As a grammar of 128 alternatives takes too long to compile."""
    tools = [{"type": "function", "function": {"name": f"f{i}"}} for i in range(127)]
    spec, _ = chosen("required", tools=[*tools, WEATHER])
    schema = json.loads(spec.constraint.json_schema)

    assert len(schema["items"]["anyOf"]) == 2
    for name, arguments, valid in [("f126", {}, True), ("f0", {"a": 1}, False), ("weather", {}, False)]:
        assert Draft202012Validator(schema).is_valid([{"name": name, "arguments": arguments}]) is valid


def test_required_calls_are_read_from_an_array() -> None:
    _, make_parser = chosen("required")
    texts = ('[{"name": "time", "argum', 'ents": {}}, {"name": "weather", "arguments": {"city": "Oslo"}}]')
    assert calls_in(read(make_parser, *texts)) == [("time", {}), ("weather", {"city": "Oslo"})]


def test_only_one_call_is_required_where_only_one_may_be() -> None:
    spec, _ = chosen("required", parallel_tool_calls=False)
    assert json.loads(spec.constraint.json_schema)["maxItems"] == 1


def test_a_call_that_is_cut_off_keeps_what_there_is() -> None:
    _, make_parser = chosen({"type": "function", "function": {"name": "weather"}})
    message = read(make_parser, '{"city": "Os')
    assert message["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Os'}


def test_what_matches_no_schema_is_content() -> None:
    """As when the constraint isn't kept."""
    _, make_parser = chosen("required")
    assert read(make_parser, "Hello, [you]")["content"] == "Hello, [you]"


@pytest.mark.parametrize(
    ("choice", "fields"),
    [
        ("required", {"tools": []}),
        ({"type": "function", "function": {"name": "another"}}, {}),
    ],
)
def test_a_choice_of_what_is_not_there_is_refused(choice: Any, fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        chosen(choice, **fields)
    assert caught.value.field == "tool_choice"


async def test_a_call_that_must_be_made_does_not_go_with_a_format(face: Face) -> None:
    fields = {"tools": [TIME], "tool_choice": "required", "response_format": {"type": "json_object"}}
    error = await face.refused("/v1/chat/completions", messages=MESSAGES, **fields)
    assert error["param"] == "tool_choice"


async def test_results_are_passed_on(face: Face) -> None:
    called = {
        "id": "c1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Oslo"}'},
    }
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "c1", "content": "-3 degrees"},
    ]
    call = chat(face, messages=messages)
    submit = await answer(face, "No.")
    prompt = TOKENIZER.decode(submit.prompt_token_ids)
    assert (await call).choices[0].message.content == "No."
    assert "Oslo" in prompt
    assert "-3 degrees" in prompt
