"""JSON schemas by combination: every supported kind of value, in every place that a value can take."""

from collections.abc import Iterator
from itertools import product
from typing import Any

VALUES: dict[str, Any] = {
    "null": {"type": "null"},
    "boolean": {"type": "boolean"},
    "integer": {"type": "integer"},
    "integer from": {"type": "integer", "minimum": 3},
    "integer range": {"type": "integer", "minimum": -5, "maximum": 120},
    "integer between": {"type": "integer", "exclusiveMinimum": 9, "exclusiveMaximum": 12},
    "number": {"type": "number"},
    "number range": {"type": "number", "minimum": 0.5, "maximum": 2.25},
    "number above": {"type": "number", "exclusiveMinimum": 0},
    "bound alone": {"maximum": 7},
    "string length": {"type": "string", "minLength": 1, "maxLength": 6},
    "length alone": {"maxLength": 3},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-\\d+$"},
    "pattern of quotes": {"type": "string", "pattern": '^"\\\\x\\n$'},
    "pattern alone": {"pattern": "^(?:ab|c+)?$"},
    "date": {"type": "string", "format": "date"},
    "date-time": {"type": "string", "format": "date-time"},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "email": {"type": "string", "format": "email"},
    "enum": {"enum": ["red", "green", 'q"uote', 3, None, [1], {"a": True}]},
    "enum of a type": {"type": "string", "enum": ["a", 1, "b"]},
    "const": {"const": {"version": [1, 2], "é": "\n"}},
    "several types": {"type": ["integer", "null"], "minimum": 5},
    "array": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
    "items alone": {"items": {"enum": [0, 1]}, "maxItems": 2},
    "tuple": {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "boolean"}], "items": False},
    "empty": {"type": "object", "additionalProperties": False},
    "any of": {"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 2}]},
    "one of": {
        "oneOf": [
            {
                "type": "object",
                "properties": {"kind": {"const": kind}, "x": {"type": x}},
                "required": ["kind", "x"],
            }
            for kind, x in (("a", "integer"), ("b", "boolean"))
        ]
    },
    "all of one": {"allOf": [{"type": "boolean"}], "description": "a flag"},
}


def _required(value: Any) -> Any:
    properties = {"first": value, "second": {"type": "boolean"}}
    return {"type": "object", "properties": properties, "required": ["first", "second"]}


def _optional(value: Any) -> Any:
    closed = {"type": "object", "properties": {"a/b": value, "c": value}, "additionalProperties": False}
    return closed | {"required": ["c"]}


def _unnamed(value: Any) -> Any:
    return {"properties": {"id": {"type": "integer"}}, "required": ["id"], "additionalProperties": value}


def _required_only(value: Any) -> Any:
    return {"type": "object", "required": ["z"], "additionalProperties": value}


def _list(value: Any) -> Any:
    return {"type": "array", "items": value, "minItems": 1, "maxItems": 2}


def _alternative(value: Any) -> Any:
    return {"anyOf": [value, {"type": "null"}]}


def _referenced(value: Any) -> Any:
    return {
        "$defs": {"a~b": value},
        "type": "object",
        "properties": {"x": {"$ref": "#/$defs/a~0b"}},
        "required": ["x"],
    }


def _chain(value: Any) -> Any:
    node = {
        "type": "object",
        "properties": {"value": value, "next": {"anyOf": [{"type": "null"}, {"$ref": "#/definitions/node"}]}},
        "required": ["value", "next"],
        "additionalProperties": False,
    }
    return {"definitions": {"node": node}, "$ref": "#/definitions/node"}


_PLACES = [_required, _optional, _unnamed, _required_only, _list, _alternative, _referenced, _chain]


def schemas() -> Iterator[tuple[str, Any]]:
    """A name and a schema: each value alone, and in each place."""
    yield from VALUES.items()
    for (name, value), place in product(VALUES.items(), _PLACES):
        yield f"{place.__name__[1:]} {name}", place(value)
