"""What is wrong with a constraint is refused by field, before it reaches a shard."""

import json

import pytest

from common.constraint import MAX_CHOICES, MAX_CONSTRAINT_BYTES, check_constraint
from common.sampling import FieldError
from pagoda.v1.inference_pb2 import Choices, Constraint

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
    check_constraint(constraint, STOP, 0, "c")


INVALID = [
    (Constraint(), "c", "set one of json_schema, json_object"),
    (schema(""), "c.json_schema", "is not JSON"),
    (schema("{"), "c.json_schema", "is not JSON"),
    (schema("[1]"), "c.json_schema", "object or a boolean"),
    (schema('{"const": NaN}'), "c.json_schema", "NaN"),
    (schema(r'{"const": "\ud800"}'), "c.json_schema", "surrogate"),
    (schema("[" * 60_000), "c.json_schema", "nested too deep"),
    (schema(json.dumps({"title": "x" * MAX_CONSTRAINT_BYTES})), "c.json_schema", "at most 65536"),
    (Constraint(json_object=False), "c.json_object", "false"),
    (Constraint(regex=""), "c.regex", "is empty"),
    (Constraint(ebnf=""), "c.ebnf", "is empty"),
    (Constraint(choice=Choices()), "c.choice.values", "0 values"),
    (Constraint(choice=Choices(values=["a"] * (MAX_CHOICES + 1))), "c.choice.values", "257 values"),
    (Constraint(choice=Choices(values=["a", ""])), "c.choice.values[1]", "is empty"),
]


@pytest.mark.parametrize(("constraint", "field", "message"), INVALID)
def test_what_is_wrong_is_refused_by_field(constraint: Constraint, field: str, message: str) -> None:
    with pytest.raises(FieldError, match=message) as caught:
        check_constraint(constraint, STOP, 0, "c")

    assert caught.value.field == field


@pytest.mark.parametrize(
    ("stop", "min_tokens", "message"), [(frozenset[int](), 0, "ignore_eos"), (STOP, 1, "min_tokens")]
)
def test_the_constraint_alone_says_when_an_output_ends(
    stop: frozenset[int], min_tokens: int, message: str
) -> None:
    with pytest.raises(FieldError, match=message):
        check_constraint(Constraint(regex="a"), stop, min_tokens, "c")
