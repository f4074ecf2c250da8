"""Schemas that can't be honoured are refused by the keyword at fault and its place."""

from typing import Any

import pytest

from shard.json_schema import MAX_DEPTH, SchemaError, supported

INTEGER = {"type": "integer"}


def nested(depth: int) -> dict[str, Any]:
    return {"type": "array", "items": nested(depth - 1)} if depth else {}


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
    (nested(MAX_DEPTH + 1), "nested more than 64 deep"),
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
