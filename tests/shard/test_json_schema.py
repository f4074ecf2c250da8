"""Schemas that can't be honoured are refused by the keyword at fault and its place."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import xgrammar
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from pagoda.v1.inference_pb2 import Constraint
from shard.grammar_compiler import build
from shard.json_schema import MAX_DEPTH, SchemaError, supported

INTEGER = {"type": "integer"}


def nested(depth: int) -> dict[str, Any]:
    return {"type": "array", "items": nested(depth - 1)} if depth else {}


LETTERS = "0123456789.-+eE"


def accepting(schema: Any) -> Callable[[str], bool]:
    """Tells which texts, of what numbers are written with, a schema's grammar allows."""
    grammar = build(Constraint(json_schema=json.dumps(schema)))
    info = xgrammar.TokenizerInfo([*LETTERS, ""], stop_token_ids=[len(LETTERS)])
    compiled = xgrammar.GrammarCompiler(info).compile_grammar(grammar)

    def accepts(text: str) -> bool:
        matcher = xgrammar.GrammarMatcher(compiled)
        return all(matcher.accept_token(LETTERS.index(letter)) for letter in text) and matcher.is_completed()

    return accepts


UNSUPPORTED: list[tuple[Any, str]] = [
    *(
        ({keyword: True, "type": "object"}, f"{keyword} at # isn't supported")
        for keyword in (
            "not",
            "if",
            "multipleOf",
            "uniqueItems",
            "contains",
            "patternProperties",
            "propertyNames",
            "minProperties",
            "maxProperties",
            "dependentRequired",
            "dependentSchemas",
            "unevaluatedProperties",
            "unevaluatedItems",
            "additionalItems",
        )
    ),
    (False, "nothing satisfies"),
    (3, "must be an object or a boolean"),
    ({"properties": {"a/b": {"items": {"not": {}}}}}, "not at #/properties/a~1b/items"),
    ({"type": "any"}, "type at #"),
    ({"type": []}, "type at #"),
    ({"type": "integer", "minimum": "x"}, "minimum at # must be a number"),
    ({"type": "integer", "const": "x"}, "no value of type integer"),
    ({"enum": []}, "one or more"),
    ({"enum": [1], "minimum": 2}, "enum beside minimum"),
    ({"type": "string", "pattern": "a", "minLength": 2}, "pattern beside minLength"),
    ({"type": "string", "format": "ipv6"}, "format 'ipv6' at #"),
    ({"type": "string", "pattern": "(?!a)"}, "pattern at #: look-around"),
    ({"minimum": 1, "minLength": 1}, "need a type"),
    ({"minLength": -1}, "minLength at #"),
    ({"prefixItems": [INTEGER, {}], "maxItems": 1}, "maxItems below the number of prefixItems at #"),
    ({"prefixItems": [{}], "items": False, "minItems": 2}, "minItems above the number of prefixItems"),
    ({"minLength": 3, "maxLength": 2}, "minLength above maxLength at #"),
    ({"items": {"minItems": 3, "maxItems": 2}}, "minItems above maxItems at #/items"),
    ({"maxItems": 10_001}, "from 0 to 10000"),
    ({"type": "object", "properties": []}, "properties at #"),
    ({"type": "object", "required": "a"}, "required at #"),
    ({"required": ["a"], "additionalProperties": False}, "#/properties/a is false"),
    ({"$anchor": "x"}, "anchor at # isn't supported"),
    ({"properties": {"a": False}, "additionalProperties": True}, "#/properties/a is false"),
    ({"items": [INTEGER]}, "#/items must be"),
    ({"anyOf": []}, "anyOf at #"),
    ({"anyOf": [INTEGER], "type": "integer"}, "anyOf beside type"),
    ({"oneOf": [INTEGER, {"type": "number"}]}, "alternatives overlap"),
    ({"oneOf": [{"const": 1}, {"enum": [1, 2]}]}, "alternatives overlap"),
    ({"allOf": [INTEGER, {"minimum": 1}]}, "allOf of several"),
    ({"$ref": "#/$defs/none"}, "there is no #/\\$defs/none"),
    ({"$ref": "other.json"}, "must begin with #/"),
    ({"$ref": "#", "minimum": 3}, "\\$ref beside minimum"),
    ({"$ref": "#"}, "\\$ref at #: # is defined by itself"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}}, "#/\\$defs/a is defined by"),
    ({"anyOf": [INTEGER, {"$ref": "#"}]}, "at #/anyOf/1: # is defined by itself"),
    (nested(MAX_DEPTH + 1), "nested more than 64 deep"),
    ({"minimum": 51.1234567, "maximum": 51.1234569}, "minimum and maximum leave no number .* at #"),
    ({"items": {"exclusiveMinimum": 0, "exclusiveMaximum": 1e-6}}, "leave no number .* at #/items"),
    ({"minimum": 1e-9, "maximum": 1e-8}, "leave no number"),
    ({**INTEGER, "minimum": 5, "maximum": 1}, "minimum and maximum leave no integer, at #"),
    ({**INTEGER, "exclusiveMinimum": 1, "exclusiveMaximum": 2}, "leave no integer"),
    ({**INTEGER, "minimum": -(10**400)}, "minimum -10{28} is beyond 9223372036854775807"),
    ({**INTEGER, "maximum": 2**63}, "maximum 9223372036854775808 is beyond"),
    ({"exclusiveMaximum": 1e300}, "exclusiveMaximum 1e\\+300 is beyond"),
    ({"maximum": float("inf")}, "maximum inf is beyond"),
    ({"exclusiveMaximum": 2.0**60}, "aren't told apart"),
    ({"const": {"a": [2**63]}}, "const at # has a number beyond 9223372036854775807"),
]


@pytest.mark.parametrize(("schema", "message"), UNSUPPORTED)
def test_what_can_not_be_honoured_is_named(schema: Any, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        supported(schema)


def test_an_object_that_names_its_properties_holds_no_others_unless_it_says_so() -> None:
    named = {"properties": {"a": INTEGER}}

    assert supported(named)["additionalProperties"] is False
    assert supported({**named, "additionalProperties": INTEGER})["additionalProperties"] == INTEGER
    assert supported({"type": "object"})["additionalProperties"] == {}


def test_unknown_keywords_are_annotations() -> None:
    assert supported({"type": "integer", "title": "Age", "x-ours": {"not": 1}}) == {**INTEGER, "$defs": {}}


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        ({"minimum": 1e-9, "exclusiveMaximum": 1}, {"minimum": 1e-6, "maximum": 0.999999}),
        ({"exclusiveMinimum": 0, "minimum": -3, "maximum": 2.5}, {"minimum": 1e-6, "maximum": 2.5}),
        ({"minimum": 1e10 + 0.5, "exclusiveMaximum": 1e12}, {"minimum": 10**10 + 1, "maximum": 10**12 - 1}),
        ({"type": "integer", "minimum": 1.5, "exclusiveMaximum": 4}, {"minimum": 2, "maximum": 3}),
    ],
)
def test_bounds_are_narrowed_to_what_can_be_written(bounds: Any, expected: Any) -> None:
    assert supported({"type": "number", **bounds}) == {
        "type": bounds.get("type", "number"),
        **expected,
        "$defs": {},
    }


numbers = st.decimals(-1100, 1100, places=7) | st.integers(-1100, 1100)


@settings(deadline=None, max_examples=150, derandomize=True)
@given(st.tuples(numbers, numbers), st.sampled_from(["minimum", "exclusiveMinimum"]), st.booleans())
def test_what_a_grammar_allows_of_numbers_lies_within_their_bounds(
    ends: tuple[Any, Any], keyword: str, whole: bool
) -> None:
    low, high = map(float, sorted(ends))
    schema = {"type": "integer" if whole else "number", keyword: low, "exclusiveMaximum": high}
    try:
        allowed = accepting(schema)
    except SchemaError:
        return
    step = 1 if whole else 1e-6

    near = [end + step * steps for end in (low, high) for steps in (-2, -1, -0.5, 0, 0.5, 1, 2)]
    texts = {f"{value:.{places}f}" for value in near for places in (0, 1, 6)}

    taken = set(filter(allowed, texts))
    assert taken
    assert all(Draft202012Validator(schema).is_valid(json.loads(text)) for text in taken)
