"""Structured output of the embedded model, over gRPC."""

import json
import re
from collections.abc import Iterator

import grpc
import jsonschema
import pytest

from pagoda.v1 import inference_pb2 as pb
from pagoda.v1.inference_pb2_grpc import InferenceServiceStub
from pagoda.v1.sampling_pb2 import SamplingParams
from tests.e2e.client import Answer, status
from tests.e2e.stack import Stack, launched

pytestmark = pytest.mark.e2e

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "born": {"type": "string", "format": "date"},
        "languages": {"type": "array", "items": {"enum": ["en", "fr", "de"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "age", "born", "languages"],
}


@pytest.fixture
def stub(stack: Stack) -> Iterator[InferenceServiceStub]:
    with stack.channel() as channel:
        yield stack.stub(channel)


def asking(question: str, constraint: pb.Constraint, n: int = 1) -> pb.GenerateRequest:
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content=question)])
    stop = pb.StopConditions(max_tokens=120)
    sampling = SamplingParams(temperature=0.7, seed=1)
    return pb.GenerateRequest(
        spec=pb.GenerateSpec(chat=chat, constraint=constraint, stop=stop, sampling=sampling, n=n)
    )


def test_outputs_are_values_of_the_schema(stub: InferenceServiceStub) -> None:
    constraint = pb.Constraint(json_schema=json.dumps(PERSON))

    response = stub.Generate(asking("Describe a person as JSON.", constraint, n=3), timeout=120)

    for output in response.outputs:
        assert output.finish_reason == pb.FINISH_REASON_STOP
        jsonschema.validate(json.loads(output.text), PERSON)


def test_an_output_matches_the_regex(stub: InferenceServiceStub) -> None:
    constraint = pb.Constraint(regex=r"The answer is \d{1,3}\.")

    output = stub.Generate(asking("What is 6 times 7?", constraint), timeout=120).outputs[0]

    assert re.fullmatch(constraint.regex, output.text)
    assert output.finish_reason == pb.FINISH_REASON_STOP


def test_an_output_is_one_of_the_choices(stub: InferenceServiceStub) -> None:
    values = ["positive", "negative"]
    constraint = pb.Constraint(choice=pb.Choices(values=values))

    response = stub.Generate(asking("'I love it.' Positive or negative?", constraint, n=2), timeout=120)

    assert all(output.text in values for output in response.outputs)


def test_a_constrained_output_goes_on_after_its_shard_was_killed() -> None:
    with launched() as stack:
        stack.wait_ready()
        with stack.channel() as channel:
            request = asking("Describe a person as JSON.", pb.Constraint(json_schema=json.dumps(PERSON)))
            answer = Answer(stack.stub(channel), request.spec).read(5)

            stack.children()["shard"].kill()
            answer.finish()

    jsonschema.validate(json.loads(answer.text), PERSON)


def test_an_unsupported_keyword_is_named(stub: InferenceServiceStub) -> None:
    constraint = pb.Constraint(json_schema='{"type": "array", "uniqueItems": true}')

    code, message = status(lambda: stub.Generate(asking("List numbers.", constraint), timeout=120))

    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert message == "spec.constraint: uniqueItems at # isn't supported"
