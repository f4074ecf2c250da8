"""JSON schemas of constraints: checked, and put in the form that xgrammar honours.

xgrammar skips keywords that it doesn't know, and some that it does know beside others. Here every schema
either becomes one whose every value is valid under it, perhaps narrower, or is refused by the keyword at
fault.
"""

import math
from collections.abc import Mapping
from typing import Any, Final

from shard.number_bounds import MAX_BOUND, BoundsError, narrowed
from shard.regex import RegexError, to_json_ebnf
from shard.string_formats import FORMATS

Schema = Mapping[str, Any] | bool

MAX_DEPTH: Final = 64
MAX_COUNT: Final = 10_000
"""Of characters and items that a schema may name."""

# Say nothing of which values are valid.
_ANNOTATIONS: Final = frozenset(
    [
        "$schema",
        "$id",
        "$comment",
        "$defs",
        "definitions",
        "title",
        "description",
        "default",
        "examples",
        "example",
        "deprecated",
        "readOnly",
        "writeOnly",
        "discriminator",
        "contentEncoding",
        "contentMediaType",
        "contentSchema",
    ]
)
_OF_TYPE: Final[Mapping[str, tuple[str, ...]]] = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    "integer": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "object": ("properties", "required", "additionalProperties"),
    "boolean": (),
    "null": (),
}
_TYPED: Final = {keyword for keywords in _OF_TYPE.values() for keyword in keywords}
_GENERAL: Final = frozenset(["type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref"])
_UNSUPPORTED: Final = frozenset(
    [
        "not",
        "if",
        "then",
        "else",
        "multipleOf",
        "uniqueItems",
        "contains",
        "minContains",
        "maxContains",
        "additionalItems",
        "unevaluatedItems",
        "minProperties",
        "maxProperties",
        "patternProperties",
        "propertyNames",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "unevaluatedProperties",
        "$dynamicRef",
        "$recursiveRef",
        "$anchor",
        "$dynamicAnchor",
    ]
)
_PYTHON_TYPES: Final[Mapping[str, type | tuple[type, ...]]] = {
    "string": str,
    "number": (int, float),
    "integer": int,
    "array": list,
    "object": dict,
    "boolean": bool,
    "null": type(None),
}


class SchemaError(ValueError):
    """A schema that can't be honoured; the message names the keyword and where it stands."""


def supported(schema: Schema) -> dict[str, Any]:
    """A schema for xgrammar, each of whose values is valid under `schema`.

    Its patterns are expressions of EBNF in hexadecimal digits, to be put into the grammar in their places.

    Raises:
        SchemaError: there is none that would be of use.
    """
    return _Translation(schema).run()


class _Translation:
    """One document. What its references name is translated once, and found under `$defs` of the result."""

    def __init__(self, document: Schema) -> None:
        self._document = document
        # By reference.
        self._names: dict[str, str] = {}
        self._definitions: dict[str, Any] = {}

    def run(self) -> dict[str, Any]:
        return {**self._translate(self._document, "#", 0), "$defs": self._definitions}

    def _translate(self, schema: Any, where: str, depth: int) -> dict[str, Any]:
        if depth > MAX_DEPTH:
            raise SchemaError(f"{where} is nested more than {MAX_DEPTH} deep")
        if schema is True:
            return {}
        if schema is False:
            raise SchemaError(f"{where} is false, which nothing satisfies")
        if not isinstance(schema, dict):
            raise SchemaError(f"{where} must be an object or a boolean")
        keywords = [keyword for keyword in schema if keyword not in _ANNOTATIONS]
        for keyword in keywords:
            if keyword in _UNSUPPORTED:
                raise SchemaError(f"{keyword} at {where} isn't supported")
        asserting = {keyword for keyword in keywords if keyword in _TYPED | _GENERAL}

        def alone(keyword: str, beside: frozenset[str] = frozenset()) -> None:
            others = asserting - {keyword} - beside
            if others:
                raise SchemaError(f"{keyword} beside {min(others)} at {where} isn't supported")

        if "$ref" in schema:
            alone("$ref")
            return {"$ref": self._reference(schema["$ref"], where, depth)}
        if "enum" in schema or "const" in schema:
            keyword = "enum" if "enum" in schema else "const"
            alone(keyword, frozenset({"type"}))
            return {"enum": _values(schema, keyword, where)}
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                alone(keyword)
                ways = _list(schema, keyword, where)
                translated = [
                    self._translate(way, f"{where}/{keyword}/{index}", depth + 1)
                    for index, way in enumerate(ways)
                ]
                if keyword == "oneOf":
                    self._check_disjoint(ways, f"{where}/{keyword}")
                return {"anyOf": translated}
        if "allOf" in schema:
            alone("allOf")
            ways = _list(schema, "allOf", where)
            if len(ways) > 1:
                raise SchemaError(f"allOf of several schemas at {where} isn't supported")
            return self._translate(ways[0], f"{where}/allOf/0", depth + 1)
        types = _types(schema, asserting, where)
        if not types:
            return {}
        ways = [self._of_type(kind, schema, where, depth) for kind in types]
        return ways[0] if len(ways) == 1 else {"anyOf": ways}

    def _of_type(self, kind: str, schema: Mapping[str, Any], where: str, depth: int) -> dict[str, Any]:
        match kind:
            case "string":
                return _string(schema, where)
            case "array":
                return self._array(schema, where, depth)
            case "object":
                return self._object(schema, where, depth)
        bounds = {keyword: schema[keyword] for keyword in _OF_TYPE[kind] if keyword in schema}
        for keyword, bound in bounds.items():
            if not _is_a(bound, "number"):
                raise SchemaError(f"{keyword} at {where} must be a number")
        try:
            return {"type": kind, **narrowed(bounds, whole=kind == "integer")}
        except BoundsError as error:
            raise SchemaError(f"{error}, at {where}") from error

    def _array(self, schema: Mapping[str, Any], where: str, depth: int) -> dict[str, Any]:
        counts = _counts(schema, "minItems", "maxItems", where)
        items = schema.get("items", "prefixItems" not in schema)
        if "prefixItems" not in schema:
            if items is False:
                if counts.get("minItems"):
                    raise SchemaError(f"minItems beside items false at {where} leaves no value")
                return {"type": "array", "maxItems": 0}
            return {"type": "array", "items": self._translate(items, f"{where}/items", depth + 1), **counts}
        prefix = [
            self._translate(item, f"{where}/prefixItems/{index}", depth + 1)
            for index, item in enumerate(_list(schema, "prefixItems", where))
        ]
        if counts.get("maxItems", MAX_COUNT) < len(prefix):
            raise SchemaError(f"maxItems below the number of prefixItems at {where} isn't supported")
        if items is False and counts.get("minItems", 0) > len(prefix):
            raise SchemaError(f"minItems above the number of prefixItems at {where} leaves no value")
        rest = False if items is False else self._translate(items, f"{where}/items", depth + 1)
        return {"type": "array", "prefixItems": prefix, "items": rest, **counts}

    def _object(self, schema: Mapping[str, Any], where: str, depth: int) -> dict[str, Any]:
        """Where it doesn't say, an object that names its properties holds no others."""
        properties = schema.get("properties", {})
        required = schema.get("required", [])
        if not isinstance(properties, dict):
            raise SchemaError(f"properties at {where} must be an object")
        if not (isinstance(required, list) and all(isinstance(name, str) for name in required)):
            raise SchemaError(f"required at {where} must be a list of names")
        others = schema.get("additionalProperties", not (properties or required))
        unnamed = schema.get("additionalProperties", True)
        translated = {}
        for name in dict.fromkeys([*properties, *required]):
            path = f"{where}/properties/{_escaped(name)}"
            one = properties.get(name, unnamed)
            if one is False and name in properties and name not in required:
                if others is not False:
                    raise SchemaError(f"{path} is false, beside additionalProperties: isn't supported")
                continue
            translated[name] = self._translate(one, path, depth + 1)
        return {
            "type": "object",
            "properties": translated,
            "required": list(dict.fromkeys(required)),
            "additionalProperties": others is not False
            and self._translate(others, f"{where}/additionalProperties", depth + 1),
        }

    def _reference(self, reference: Any, where: str, depth: int) -> str:
        if reference not in self._names:
            target = self._resolve(reference, where)
            if reference in self._leads_to(target, where):
                raise SchemaError(f"$ref at {where}: {reference[:100]} is defined by itself alone")
            name = self._names[reference] = f"d{len(self._names)}"
            self._definitions[name] = self._translate(target, reference, depth + 1)
        return f"#/$defs/{self._names[reference]}"

    def _leads_to(self, schema: Any, where: str) -> set[str]:
        """The references that a value of `schema` may have to satisfy itself, not a part of it."""
        found: set[str] = set()
        waiting = [schema]
        while waiting:
            if not isinstance(one := waiting.pop(), dict):
                continue
            if "$ref" in one and one["$ref"] not in found:
                waiting.append(self._resolve(one["$ref"], where))
                found.add(one["$ref"])
            for keyword in ("anyOf", "oneOf", "allOf"):
                waiting += _list(one, keyword, where) if keyword in one else []
        return found

    def _resolve(self, reference: Any, where: str) -> Any:
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            raise SchemaError(f"$ref at {where} must begin with #/: other documents and anchors aren't read")
        target: Any = self._document
        for part in reference.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(target, dict) and key in target:
                target = target[key]
            elif isinstance(target, list) and key.isdecimal() and int(key) < len(target):
                target = target[int(key)]
            else:
                raise SchemaError(f"$ref at {where}: there is no {reference[:100]}")
        return target

    def _check_disjoint(self, ways: list[Any], where: str) -> None:
        """No value may satisfy two of `ways`: told by their types, or by what one property is."""
        targets = [self._followed(way, where) for way in ways]
        for index, one in enumerate(targets):
            for other in targets[:index]:
                if not self._disjoint(one, other, where):
                    raise SchemaError(f"{where} isn't supported where alternatives overlap; use anyOf")

    def _disjoint(self, one: Any, other: Any, where: str) -> bool:
        if not (isinstance(one, dict) and isinstance(other, dict)):
            return False
        if _kinds(one).isdisjoint(_kinds(other)):
            return True
        fixed, others = _fixed(one), _fixed(other)
        if fixed is not None and others is not None:
            return not any(value in others for value in fixed)
        if _kinds(one) | _kinds(other) != {"object"}:
            return False
        shared = set(one.get("required", ())) & set(other.get("required", ()))
        ours, theirs = one.get("properties", {}), other.get("properties", {})
        return any(
            self._disjoint(
                self._followed(ours.get(name), where), self._followed(theirs.get(name), where), where
            )
            for name in shared
        )

    def _followed(self, schema: Any, where: str) -> Any:
        for _ in range(MAX_DEPTH):
            if not (isinstance(schema, dict) and "$ref" in schema):
                break
            schema = self._resolve(schema["$ref"], where)
        return schema


def _fixed(schema: Mapping[str, Any]) -> list[Any] | None:
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else None


def _kinds(schema: Mapping[str, Any]) -> set[str]:
    """The types that a schema's values may have, numbers and integers as one; all if it doesn't say."""
    if (values := _fixed(schema)) is not None:
        kinds = {kind for value in values for kind in _OF_TYPE if _is_a(value, kind)}
    else:
        named = schema.get("type", list(_OF_TYPE))
        kinds = set(named if isinstance(named, list) else [named])
    return {"number" if kind == "integer" else kind for kind in kinds}


def _types(schema: Mapping[str, Any], asserting: set[str], where: str) -> list[str]:
    """As named, or the one that the other keywords are about; none if any value will do."""
    if "type" in schema:
        given = schema["type"]
        types = given if isinstance(given, list) else [given]
        if not types or not all(isinstance(kind, str) and kind in _OF_TYPE for kind in types):
            raise SchemaError(f"type at {where} must be one or more of {', '.join(_OF_TYPE)}")
        return list(dict.fromkeys(types))
    types = [kind for kind, keywords in _OF_TYPE.items() if asserting & set(keywords) and kind != "integer"]
    if len(types) > 1:
        raise SchemaError(f"{' and '.join(sorted(asserting))} at {where} need a type beside them")
    return types


def _string(schema: Mapping[str, Any], where: str) -> dict[str, Any]:
    given = [keyword for keyword in ("pattern", "format", "minLength", "maxLength") if keyword in schema]
    if not given:
        return {"type": "string"}
    if len(given) > 1 and given != ["minLength", "maxLength"]:
        raise SchemaError(f"{given[0]} beside {given[1]} at {where} isn't supported")
    if given[0] == "format":
        if not (isinstance(schema["format"], str) and schema["format"] in FORMATS):
            message = f"format {str(schema['format'])[:50]!r} at {where} isn't supported; these are"
            raise SchemaError(f"{message}: {', '.join(FORMATS)}")
        pattern = FORMATS[schema["format"]]
    elif given[0] == "pattern":
        pattern = _text(schema["pattern"], where)
    else:
        return {"type": "string", **_counts(schema, "minLength", "maxLength", where)}
    try:
        return {"type": "string", "pattern": to_json_ebnf(pattern).encode().hex()}
    except RegexError as error:
        raise SchemaError(f"pattern at {where}: {error}") from error


def _text(pattern: Any, where: str) -> str:
    if not isinstance(pattern, str):
        raise SchemaError(f"pattern at {where} must be a string")
    return pattern


def _counts(schema: Mapping[str, Any], least: str, most: str, where: str) -> dict[str, int]:
    counts = {keyword: schema[keyword] for keyword in (least, most) if keyword in schema}
    for keyword, count in counts.items():
        if not (_is_a(count, "integer") and 0 <= count <= MAX_COUNT):
            raise SchemaError(f"{keyword} at {where} must be an integer from 0 to {MAX_COUNT}")
    if counts.get(least, 0) > counts.get(most, MAX_COUNT):
        raise SchemaError(f"{least} above {most} at {where} leaves no value")
    return {keyword: int(count) for keyword, count in counts.items()}


def _list(schema: Mapping[str, Any], keyword: str, where: str) -> list[Any]:
    if not isinstance(schema[keyword], list) or not schema[keyword]:
        raise SchemaError(f"{keyword} at {where} must be a list of one or more")
    return list(schema[keyword])


def _values(schema: Mapping[str, Any], keyword: str, where: str) -> list[Any]:
    """Those of enum or const that have the type beside it."""
    values = [schema["const"]] if keyword == "const" else _list(schema, "enum", where)
    types = _types(schema, set(), where) or list(_OF_TYPE)
    fitting = [value for value in values if any(_is_a(value, kind) for kind in types)]
    if not fitting:
        raise SchemaError(f"{keyword} at {where} has no value of type {' or '.join(types)}")
    if not _exactly_written(fitting):
        raise SchemaError(f"{keyword} at {where} has a number beyond {MAX_BOUND}, either way")
    return fitting


def _exactly_written(value: Any) -> bool:
    """Whether xgrammar writes all numbers in a value as they are."""
    if isinstance(value, dict | list):
        return all(map(_exactly_written, value.values() if isinstance(value, dict) else value))
    if isinstance(value, float):
        return math.isfinite(value)
    return not isinstance(value, int) or abs(value) <= MAX_BOUND


def _is_a(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _PYTHON_TYPES[kind])


def _escaped(name: str) -> str:
    return name[:50].replace("~", "~0").replace("/", "~1")
