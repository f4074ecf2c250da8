"""What is wrong with a constraint is refused by field, before it reaches a scheduler."""

import json
from typing import Any

import pytest

from pagoda.v1.inference_pb2 import BeamSearch, Choices, Constraint, GenerateSpec, StopConditions
from router.constraint import MAX_CHOICES, MAX_CONSTRAINT_BYTES, check_constraint
from router.errors import RequestError

STOP = frozenset([2])


def schema(text: str) -> Constraint:
    return Constraint(json_schema=text)


@pytest.mark.parametrize(
    "constraint",
    [
        schema('{"type": "object"}'),
        schema("true"),
        Constraint(json_object=True),
        Constraint(regex="a+"),
        Constraint(ebnf='root ::= "a"'),
        Constraint(choice=Choices(values=["a"] * MAX_CHOICES)),
    ],
)
def test_each_kind_is_taken(constraint: Constraint) -> None:
    check_constraint(GenerateSpec(constraint=constraint), STOP)


INVALID: list[tuple[dict[str, Any], str, str]] = [
    ({"constraint": Constraint()}, "spec.constraint", "set one of json_schema, json_object"),
    ({"constraint": schema("")}, "spec.constraint.json_schema", "is not JSON"),
    ({"constraint": schema("{")}, "spec.constraint.json_schema", "is not JSON"),
    ({"constraint": schema("[1]")}, "spec.constraint.json_schema", "object or a boolean"),
    ({"constraint": schema('{"const": NaN}')}, "spec.constraint.json_schema", "NaN"),
    ({"constraint": schema("[" * 60_000)}, "spec.constraint.json_schema", "nested too deep"),
    (
        {"constraint": schema(json.dumps({"title": "x" * MAX_CONSTRAINT_BYTES}))},
        "spec.constraint.json_schema",
        "65536",
    ),
    ({"constraint": Constraint(json_object=False)}, "spec.constraint.json_object", "false"),
    ({"constraint": Constraint(regex="")}, "spec.constraint.regex", "is empty"),
    ({"constraint": Constraint(ebnf="")}, "spec.constraint.ebnf", "is empty"),
    ({"constraint": Constraint(choice=Choices())}, "spec.constraint.choice.values", "0 values"),
    (
        {"constraint": Constraint(choice=Choices(values=["a"] * (MAX_CHOICES + 1)))},
        "spec.constraint.choice.values",
        "257 values",
    ),
    (
        {"constraint": Constraint(choice=Choices(values=["a", ""]))},
        "spec.constraint.choice.values[1]",
        "is empty",
    ),
    (
        {"constraint": Constraint(regex="a"), "beam_search": BeamSearch(beam_width=2)},
        "spec.constraint",
        "beam search",
    ),
    (
        {"constraint": Constraint(regex="a"), "stop": StopConditions(min_tokens=1)},
        "spec.stop.min_tokens",
        "constraint",
    ),
]


@pytest.mark.parametrize(("fields", "field", "message"), INVALID)
def test_what_is_wrong_is_refused_by_field(fields: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        check_constraint(GenerateSpec(**fields), STOP)

    assert caught.value.field == field


def test_something_must_end_a_constrained_output() -> None:
    with pytest.raises(RequestError) as caught:
        check_constraint(GenerateSpec(constraint=Constraint(regex="a")), frozenset())

    assert caught.value.field == "spec.stop.token_ids"
