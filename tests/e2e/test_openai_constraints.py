"""Tools and structured output of the OpenAI-compatible API, by the embedded model and OpenAI's own client."""

import json
import re
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

pytestmark = pytest.mark.e2e


class Food(BaseModel):
    kind: Literal["plants", "meat", "fish"]


class Animal(BaseModel):
    """Bounds keep outputs short, and the list of models makes a reference in its schema."""

    name: str = Field(max_length=12)
    legs: int = Field(ge=0, le=8)
    food: list[Food] = Field(min_length=1, max_length=2)


DESCRIBE: Any = [{"role": "user", "content": "Describe a dog."}]
TOOLS: Any = [openai.pydantic_function_tool(Animal, name="save_animal")]
TOOLS += [{"type": "function", "function": {"name": "give_up", "description": "If no animal is named."}}]
NAMED: Any = {"type": "function", "function": {"name": "save_animal"}}


@pytest.mark.parametrize("choice", [NAMED, "required"])
def test_a_tool_that_must_be_called_is_called_as_its_schema_says(
    client: openai.OpenAI, model: str, choice: Any
) -> None:
    fields: Any = {"model": model, "messages": DESCRIBE, "tools": TOOLS, "tool_choice": choice}
    fields |= {"parallel_tool_calls": False, "max_completion_tokens": 120, "temperature": 0}

    whole = client.chat.completions.create(**fields).choices[0]
    with client.chat.completions.stream(**fields) as stream:
        streamed = stream.get_final_completion().choices[0]

    assert (whole.finish_reason, streamed.finish_reason) == ("tool_calls", "tool_calls")
    assert not whole.message.content
    assert not streamed.message.content
    assert called(whole) == called(streamed)
    ((name, arguments),) = called(whole)
    assert Animal.model_validate_json(arguments) if name == "save_animal" else arguments == "{}"


def called(choice: Any) -> list[tuple[str, str]]:
    """The calls of an answer, each of which has an id of its own."""
    calls = choice.message.tool_calls
    assert len({call.id for call in calls}) == len(calls)
    return [(call.function.name, call.function.arguments) for call in calls]


def test_arguments_stream_as_they_are_written(client: openai.OpenAI, model: str) -> None:
    stream = client.chat.completions.create(
        model=model,
        messages=DESCRIBE,
        tools=TOOLS,
        tool_choice=NAMED,
        max_completion_tokens=100,
        stream=True,
    )
    pieces = [call for chunk in stream for call in chunk.choices[0].delta.tool_calls or []]

    first, *rest = [piece.function for piece in pieces]
    assert (first and first.name, pieces[0].id is not None) == ("save_animal", True)
    assert all(piece.id is None and piece.index == 0 for piece in pieces[1:])
    arguments = "".join(function.arguments or "" for function in rest if function)
    assert Animal.model_validate_json(arguments)
    assert len(rest) > 2


def test_a_tool_s_result_is_answered(client: openai.OpenAI, model: str) -> None:
    fields: Any = {"model": model, "tools": TOOLS, "max_completion_tokens": 120, "seed": 1}
    calling = (
        client.chat.completions.create(messages=DESCRIBE, tool_choice=NAMED, **fields).choices[0].message
    )
    assert calling.tool_calls
    result = {"role": "tool", "tool_call_id": calling.tool_calls[0].id, "content": "It is saved as number 7."}

    messages = [*DESCRIBE, calling, result]
    answer = client.chat.completions.create(messages=messages, tool_choice="auto", **fields).choices[0]

    assert answer.finish_reason in ("stop", "length", "tool_calls")
    assert answer.message.content or answer.message.tool_calls


def test_an_answer_is_parsed_into_a_model(client: openai.OpenAI, model: str) -> None:
    parsed = client.chat.completions.parse(
        model=model, messages=DESCRIBE, response_format=Animal, max_completion_tokens=100
    )
    with client.chat.completions.stream(
        model=model, messages=DESCRIBE, response_format=Animal, max_completion_tokens=100
    ) as stream:
        streamed = stream.get_final_completion()

    for answer in (parsed, streamed):
        assert isinstance(answer.choices[0].message.parsed, Animal)
        assert answer.choices[0].finish_reason == "stop"


def test_an_answer_is_a_json_object(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": 'Repeat exactly: {"colour": "blue"}'}],
        response_format={"type": "json_object"},
        temperature=0,
        max_completion_tokens=100,
    ).choices[0]

    assert answer.finish_reason == "stop"
    assert isinstance(json.loads(answer.message.content or ""), dict)


@pytest.mark.parametrize(
    ("outputs", "pattern"),
    [
        ({"regex": r" \d{1,3}\."}, r" \d{1,3}\."),
        ({"choice": [" blue", " red"]}, " blue| red"),
        ({"grammar": 'root ::= " " [a-c] [a-c]? "!"'}, " [a-c]{1,2}!"),
        ({"json": {"enum": [1, "two"]}}, '1|"two"'),
    ],
)
def test_completions_are_what_they_have_to_be(
    client: openai.OpenAI, model: str, outputs: dict[str, Any], pattern: str
) -> None:
    completion = client.completions.create(
        model=model,
        prompt="Once upon a time",
        n=2,
        seed=1,
        max_tokens=60,
        extra_body={"structured_outputs": outputs},
    )

    for choice in completion.choices:
        assert re.fullmatch(pattern, choice.text)
        assert choice.finish_reason == "stop"


UNSUPPORTED: Any = {"type": "array", "uniqueItems": True}
PARAMETERS: Any = {"type": "object", "properties": {"list": UNSUPPORTED}}
TOOL: Any = {"type": "function", "function": {"name": "sort", "parameters": PARAMETERS}}


@pytest.mark.parametrize(
    ("fields", "param", "place"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": UNSUPPORTED}}},
            "response_format",
            "#",
        ),
        ({"tools": [TOOL], "tool_choice": "required"}, "tools", "#/$defs/sort/properties/list"),
        ({"extra_body": {"structured_outputs": {"json": UNSUPPORTED}}}, "structured_outputs", "#"),
    ],
)
def test_a_schema_that_can_not_be_kept_is_named(
    client: openai.OpenAI, model: str, fields: dict[str, Any], param: str, place: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=model, messages=DESCRIBE, **fields)

    assert caught.value.param == param
    assert f"{param}: uniqueItems at {place} isn't supported" in caught.value.message
