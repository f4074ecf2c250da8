"""Bodies to specs, field by field."""

import json
from typing import Any

import pytest

from pagoda.v1 import inference_pb2 as pb
from pagoda.v1.sampling_pb2 import SamplingParams
from router.errors import RequestError
from router.openai.chat import chat_of
from router.openai.errors import _PARAMS
from router.openai.schemas import ChatBody, CompletionBody
from router.openai.spec import _UNSERVED, check_served, common_spec


def spec_of(**fields: Any) -> pb.GenerateSpec:
    return common_spec(CompletionBody(**{"prompt": "fox", **fields}), "mine")


def error_of(**fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        spec_of(**fields)
    return caught.value


def test_what_is_not_given_is_left_to_the_router() -> None:
    assert spec_of() == pb.GenerateSpec(request_id="mine", stop=pb.StopConditions())


def test_sampling_parameters_keep_their_names() -> None:
    given: dict[str, Any] = {
        "temperature": 0.0,
        "top_p": 0.5,
        "top_k": 3,
        "min_p": 0.25,
        "presence_penalty": 1.0,
        "frequency_penalty": -1.0,
        "repetition_penalty": 1.5,
        "seed": 7,
    }
    assert spec_of(**given).sampling == SamplingParams(**given)


def test_a_negative_seed_is_one_of_64_bits() -> None:
    assert spec_of(seed=-1).sampling.seed == 2**64 - 1


def test_top_k_is_off_at_minus_one() -> None:
    assert spec_of(top_k=-1).sampling.top_k == 0


def test_logit_bias_has_token_ids_as_keys() -> None:
    assert dict(spec_of(logit_bias={"5": -100, "7": 1.5}).sampling.logit_bias) == {5: -100, 7: 1.5}


@pytest.mark.parametrize("key", ["", "x", "-1", "1.0", "٣", str(2**32)])
def test_a_bias_of_no_token_is_refused(key: str) -> None:
    assert error_of(logit_bias={key: 1}).field == "logit_bias"


@pytest.mark.parametrize("stop", ["end", ["end"]])
def test_stop_conditions(stop: Any) -> None:
    given = {"stop_token_ids": [3], "ignore_eos": True, "include_stop_str_in_output": True, "min_tokens": 2}
    assert spec_of(stop=stop, **given).stop == pb.StopConditions(
        strings=["end"], token_ids=[3], ignore_eos=True, include_stop_string=True, min_tokens=2
    )


def test_scheduling_is_passed_on() -> None:
    spec = spec_of(model="tiny", n=2, priority=-3, cache_salt="salt")
    assert (spec.model, spec.n, spec.priority, spec.cache_salt) == ("tiny", 2, -3, "salt")


SCHEMA = {"type": "object"}


@pytest.mark.parametrize(
    ("fields", "constraint"),
    [
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
            {"json_schema": json.dumps(SCHEMA)},
        ),
        ({"structured_outputs": {"json": SCHEMA}}, {"json_schema": json.dumps(SCHEMA)}),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, {"json_schema": json.dumps(SCHEMA)}),
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, {"ebnf": 'root ::= "a"'}),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": pb.Choices(values=["a", "b"])}),
    ],
)
def test_constraints(fields: dict[str, Any], constraint: dict[str, Any]) -> None:
    assert spec_of(**fields).constraint == pb.Constraint(**constraint)


def test_a_format_of_text_is_no_constraint() -> None:
    assert not spec_of(response_format={"type": "text"}).HasField("constraint")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
        ),
    ],
)
def test_constraints_that_contradict_themselves_are_refused(fields: dict[str, Any], field: str) -> None:
    assert error_of(**fields).field == field


@pytest.mark.parametrize("name", _UNSERVED)
def test_what_is_not_served_is_refused_unless_it_changes_nothing(name: str) -> None:
    for harmless in _UNSERVED[name]:
        check_served({name: harmless})
    with pytest.raises(RequestError) as caught:
        check_served({name: "something"})
    assert caught.value.field == name


def test_what_nobody_knows_is_ignored() -> None:
    assert spec_of(metadata={"a": "b"}, no_such_field=1) == spec_of()


def test_a_conversation_with_tools_is_passed_on() -> None:
    body = ChatBody.model_validate(
        {
            "messages": [
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
                    ],
                },
                {"role": "tool", "tool_call_id": "c1", "content": "2", "name": "f"},
            ],
            "tools": [
                {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}
            ],
            "chat_template_kwargs": {"enable_thinking": False},
        }
    )
    assert chat_of(body) == pb.Chat(
        messages=[
            pb.ChatMessage(
                role="assistant", tool_calls=[pb.ToolCall(id="c1", name="f", arguments='{"x": 1}')]
            ),
            pb.ChatMessage(role="tool", tool_call_id="c1", content="2", name="f"),
        ],
        tools=[pb.Tool(name="f", description="d", parameters=json.dumps(SCHEMA))],
        template_arguments='{"enable_thinking": false}',
    )


@pytest.mark.parametrize("start", _PARAMS)
def test_every_renamed_field_is_one_of_the_contract(start: str) -> None:
    """A misspelt one would never be found."""
    message: Any = pb.GenerateSpec.DESCRIPTOR
    for name in start.rstrip(".").split(".")[1:]:
        field = message.fields_by_name[name]
        message = field.message_type
