import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.tool_calls import FORMATS, CallArguments, CallStart, Content, Part, detect, parser_for

# What texts of calls, and texts that only look like them, are made of.
PIECES = [
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "a1"),
    *('{"name": "f", "arguments": {"x": [1, "}"]}}', '{"parameters": {}, "name": "g"}', '{"name": "h"}'),
    *('{"name": "', '", "arguments": {"', "f", '{"a": "b\\"\\u00e9"}', "{}", "[]", "-1.5e3", "tru", "null"),
    *("<", "{", "}", "[", "]", '"', "\\", ",", ";", ":", " ", "\n", "é", "Hello", "\x00", "\u2028"),
]
texts = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)
objects = st.dictionaries(
    st.text(max_size=3),
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=5,
    ),
    max_size=3,
)


def joined(parts: list[Part]) -> list[Part]:
    """Neighbours of one kind as one."""
    merged: list[Part] = []
    for part in parts:
        match merged[-1:], part:
            case [Content(before)], Content(text):
                merged[-1] = Content(before + text)
            case [CallArguments(index, before)], CallArguments(same, text) if index == same:
                merged[-1] = CallArguments(index, before + text)
            case _:
                merged.append(part)
    return merged


def parse(name: str, *pushes: str) -> list[Part]:
    parser = parser_for(name)
    return joined([part for text in pushes for part in parser.push(text)] + parser.flush())


def call(index: int, name: str, arguments: str) -> list[Part]:
    return [CallStart(index, name), CallArguments(index, arguments)]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        (
            "hermes",
            'Sure.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
            [Content("Sure."), *call(0, "f", '{"a": 1}')],
        ),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n'
            '<tool_call>{"arguments": {"b": "}"}, "name": "g"}</tool_call> Done.',
            [*call(0, "f", "{}"), *call(1, "g", '{"b": "}"}'), Content("Done.")],
        ),
        ("hermes", '<tool_call>{"name": "now"}</tool_call>', call(0, "now", "{}")),
        (
            "llama3_json",
            '{"name": "f", "parameters": {"a": [1]}}; {"name": "g", "parameters": {}}',
            [*call(0, "f", '{"a": [1]}'), *call(1, "g", "{}")],
        ),
        ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {}}', call(0, "f", "{}")),
        (
            "mistral",
            'I look.[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"a": 1}}]',
            [Content("I look."), *call(0, "f", "{}"), *call(1, "g", '{"a": 1}')],
        ),
        (
            "mistral",
            '[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]g[ARGS]{}[TOOL_CALLS]h[CALL_ID]9x[ARGS]{}',
            [*call(0, "f", '{"a": 1}'), *call(1, "g", "{}"), *call(2, "h", "{}")],
        ),
    ],
)
def test_finds_the_calls_of_each_format(name: str, text: str, expected: list[Part]) -> None:
    assert parse(name, text) == expected


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "a < b, <tool>, <tool_call> and <tool_call>{} are no calls"),
        ("hermes", '<tool_call>{"name": "no such name", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arg'),
        ("hermes", '<tool_call>{"x": 01, "name": "f"}</tool_call>'),
        ("hermes", '<tool_call>{"x": "\\q", "name": "f"}</tool_call>'),
        ("llama3_json", 'Use {"name": "f", "parameters": {}}'),
        ("llama3_json", '{"answer": 42}'),
        ("llama3_json", "<|python_tag|>print(1)"),
        ("mistral", "[TOOL_CALLS] [] or [TOOL_CALLS]f(1)"),
        ("mistral", "[TOOL_CALLS]f[ARG]{}"),
    ],
)
def test_what_only_looks_like_a_call_comes_back(name: str, text: str) -> None:
    assert parse(name, text) == [Content(text)]


def test_arguments_stream_as_they_arrive() -> None:
    parser = parser_for("hermes")
    parser.push('<tool_call>{"name": "f", "arguments": ')
    assert parser.push('{"city": "Par') == [CallStart(0, "f"), CallArguments(0, '{"city": "Par')]
    assert parser.push('is"}') == [CallArguments(0, 'is"}')]


def test_content_streams_up_to_what_may_begin_a_call() -> None:
    parser = parser_for("hermes")
    assert parser.push("one two <tool") == [Content("one two")]
    assert joined(parser.push("box>")) == [Content(" <toolbox>")]


def test_text_after_arguments_that_break_off_is_content() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": x}} <tool_call>{"name": "g"}'
    broken = [*call(0, "f", '{"a": x'), Content("}}")]
    assert parse("hermes", text) == [*broken, *call(1, "g", "{}")]


def test_nesting_as_deep_as_an_output_is_long_is_parsed() -> None:
    deep = '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"
    assert parse("hermes", f'<tool_call>{{"name": "f", "arguments": {deep}}}</tool_call>') == call(
        0, "f", deep
    )


@given(name=st.sampled_from(FORMATS), text=texts, data=st.data())
def test_cuts_make_no_difference(name: str, text: str, data: st.DataObject) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8).map(sorted))
    pieces = [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]
    assert parse(name, *pieces) == parse(name, *text) == parse(name, text)


@pytest.mark.parametrize(
    ("name", "required"), [("hermes", '"name"'), ("llama3_json", '"name"'), ("mistral", "[TOOL_CALLS]")]
)
@given(text=texts)
def test_text_without_calls_comes_back_unchanged(name: str, required: str, text: str) -> None:
    plain = text.replace(required, "")
    assert parse(name, plain) == ([Content(plain)] if plain else [])


@given(name=st.sampled_from(FORMATS), arguments=objects, ascii_only=st.booleans())
def test_any_arguments_come_back_as_they_were_written(name: str, arguments: object, ascii_only: bool) -> None:
    written = json.dumps(arguments, ensure_ascii=ascii_only)
    whole = f'{{"name": "f", "arguments": {written}}}'
    text = {"hermes": f"<tool_call>{whole}</tool_call>", "mistral": f"[TOOL_CALLS][{whole}]"}.get(name, whole)
    assert parse(name, text) == call(0, "f", written)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (None, None),
        ("{{ messages }}", "hermes"),
        ("{{ tools }}<tool_call>", "hermes"),
        ("{{ tools }}<tool_call><function=", None),
        ("{{ tools }}[TOOL_CALLS]", "mistral"),
        ("{{ tools }}<|python_tag|>", "llama3_json"),
        ('{{ tools }}{"name": name, "parameters": dictionary', "llama3_json"),
        ("{{ tools }}", None),
    ],
)
def test_detects_the_format_by_the_template(template: str | None, name: str | None) -> None:
    assert detect(template) == name
