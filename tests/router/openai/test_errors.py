"""Whatever goes wrong comes in OpenAI's shape, with the status that HTTP has for it."""

import asyncio
import json
from http import HTTPStatus
from typing import Any

import grpc
import httpx
import openai
import pytest
from google.protobuf.duration_pb2 import Duration

from router.inference import Inference
from router.openai import calls
from tests.router.openai.conftest import JSON, Face, ids


def error_in(response: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(
    ("method", "path", "status", "text"),
    [
        ("GET", "/chat", 404, "'/chat'"),
        ("GET", "/v1/nothing", 404, "'/v1/nothing'"),
        ("POST", "/v1/completions/", 404, "'/v1/completions/'"),
        ("GET", "/v1/completions", 405, "doesn't take GET"),
        ("GET", "/v1/models/another", 404, "'tiny' is"),
    ],
)
async def test_wrong_paths_and_methods(face: Face, method: str, path: str, status: int, text: str) -> None:
    response = await face.http.request(method, path, headers=JSON)
    assert response.status_code == status
    error = error_in(response)
    assert error["type"] == "invalid_request_error"
    assert text in error["message"]


async def test_a_wrong_method_is_told_the_right_one(face: Face) -> None:
    response = await face.http.get("/v1/completions")
    assert response.headers["allow"] == "POST"


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"\xff", b"[]", b'"fox"', b"null", b"[" * 100_000, b'{"prompt": ' + b"9" * 5000 + b"}"],
)
async def test_broken_bodies(face: Face, body: bytes) -> None:
    response = await face.http.post("/v1/completions", content=body, headers=JSON)
    assert response.status_code == 400
    assert error_in(response)["type"] == "invalid_request_error"


@pytest.mark.parametrize("body", [b"", b"null"])
async def test_an_empty_body_is_called_so(face: Face, body: bytes) -> None:
    response = await face.http.post("/v1/completions", content=body, headers=JSON)
    assert "the body is empty" in error_in(response)["message"]


async def test_a_body_that_is_no_object_is_called_so(face: Face) -> None:
    response = await face.http.post("/v1/completions", content=b"[]", headers=JSON)
    assert error_in(response)["message"].startswith("the body: ")


HALF = "\ud800"


def called(arguments: str) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"messages": [{"role": "assistant", "tool_calls": [{"function": function}]}]}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"prompt": HALF}, "prompt"),
        ("/v1/completions", {"prompt": f"a\udc00{HALF}b"}, "prompt"),
        ("/v1/completions", {"prompt": ["fox", HALF]}, "prompt[1]"),
        ("/v1/completions", {"prompt": "fox", "model": HALF}, "model"),
        ("/v1/completions", {"prompt": "fox", "stop": ["a", HALF]}, "stop[1]"),
        ("/v1/completions", {"prompt": "fox", "user": HALF}, "user"),
        ("/v1/completions", {"prompt": "fox", "cache_salt": HALF}, "cache_salt"),
        ("/v1/completions", {"prompt": "fox", "logit_bias": {HALF: 1}}, r"logit_bias.\ud800"),
        ("/v1/completions", {"structured_outputs": {"choice": [HALF]}}, "structured_outputs.choice[0]"),
        (
            "/v1/chat/completions",
            {"tools": [{"function": {"description": HALF}}]},
            "tools[0].function.description",
        ),
        ("/v1/chat/completions", called(HALF), "messages[0].tool_calls[0].function.arguments"),
        ("/v1/chat/completions", called(r'{"a": "\ud800"}'), "messages[0].tool_calls[0].arguments.a"),
        ("/v1/chat/completions", {"chat_template_kwargs": {"a": HALF}}, "chat_template_kwargs.a"),
        ("/tokenize", {"prompt": HALF}, "prompt"),
        ("/detokenize", {"tokens": [1], "model": HALF}, "model"),
    ],
)
async def test_half_a_character_is_refused_by_name(
    face: Face, path: str, fields: dict[str, Any], param: str
) -> None:
    response = await face.http.post(path, content=json.dumps(fields), headers=JSON)
    assert response.status_code == HTTPStatus.BAD_REQUEST
    assert error_in(response)["param"] == param
    assert "half of a surrogate pair" in error_in(response)["message"]


async def test_half_a_character_in_raw_bytes_is_refused(face: Face) -> None:
    response = await face.http.post("/tokenize", content=b'{"prompt": "\xed\xa0\x80"}', headers=JSON)
    assert (response.status_code, error_in(response)["param"]) == (HTTPStatus.BAD_REQUEST, "prompt")


async def test_the_name_of_a_deep_field_is_cut(face: Face) -> None:
    nested: Any = HALF
    for _ in range(100):
        nested = {"a" * 1000: nested}
    response = await face.http.post("/v1/completions", content=json.dumps({"user": nested}), headers=JSON)
    assert len(error_in(response)["param"]) < 500


async def test_a_whole_surrogate_pair_is_a_character(face: Face) -> None:
    response = await face.http.post("/tokenize", content=rb'{"prompt": "\ud83e\udd8a"}', headers=JSON)
    assert response.json()["tokens"] == ids("🦊")


@pytest.mark.parametrize("content_type", ["", "text/plain", "application/x-www-form-urlencoded"])
async def test_only_json_is_taken(face: Face, content_type: str) -> None:
    """So a page of another site can't ask in a visitor's name: browsers send it only what is harmless."""
    headers = {"Content-Type": content_type}
    response = await face.http.post("/v1/completions", content=b'{"prompt": "fox"}', headers=headers)
    assert response.status_code == HTTPStatus.UNSUPPORTED_MEDIA_TYPE
    assert "application/json" in error_in(response)["message"]


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_that_is_too_large(face: Face, monkeypatch: pytest.MonkeyPatch, chunked: bool) -> None:
    monkeypatch.setattr(calls, "MAX_BODY_BYTES", 1000)

    async def chunks() -> Any:
        for _ in range(11):
            yield b" " * 100

    content: Any = chunks() if chunked else b" " * 1100
    response = await face.http.post("/v1/completions", content=content, headers=JSON)
    assert response.status_code == HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    assert "1000 bytes" in error_in(response)["message"]


@pytest.mark.parametrize(
    ("fields", "param", "texts"),
    [
        ({}, "prompt", ["required"]),
        ({"prompt": 5}, "prompt", ["string", "list", "given: 5"]),
        ({"prompt": "fox", "temperature": "hot"}, "temperature", ["number", "'hot'"]),
        ({"prompt": "fox", "temperature": 101}, "temperature", ["101", "at most 100"]),
        ({"prompt": "fox", "temperature": 1e300}, "temperature", ["at most 100"]),
        ({"prompt": "fox", "n": True}, "n", ["integer", "True"]),
        ({"prompt": "fox", "n": 1.5}, "n", ["integer", "1.5"]),
        ({"prompt": "fox", "n": -1}, "n", ["greater than or equal to 0"]),
        ({"prompt": "fox", "n": 2**32}, "n", ["less than or equal to 4294967295"]),
        ({"prompt": "fox", "stop": ["a", ""]}, "stop[1]", ["0 bytes", "1024"]),
        ({"prompt": [1, 420]}, "prompt[1]", ["420"]),
        ({"prompt": "fox", "stream_options": {"include_usage": 1}}, "stream_options.include_usage", ["bool"]),
        ({"prompt": "fox", "priority": 1001}, "priority", ["1001", "1000"]),
    ],
)
async def test_a_wrong_field_is_named_with_value_and_limit(
    face: Face, fields: dict[str, Any], param: str, texts: list[str]
) -> None:
    error = await face.refused(**fields)
    assert error["param"] == param
    assert all(text in error["message"] for text in [f"{param}: ", *texts]), error


async def test_a_long_value_is_not_repeated(face: Face) -> None:
    error = await face.refused(prompt={"a" * 100_000: "b"})
    assert len(error["message"]) < 500


@pytest.mark.parametrize("depth", range(100, 1300, 100))
async def test_deep_schemas_break_nothing(face: Face, depth: int) -> None:
    nested = b'{"a": ' * depth + b"{}" + b"}" * depth
    tool = b'{"type": "function", "function": {"name": "f", "parameters": %b}}' % nested
    head = b'{"messages": [{"role": "user", "content": "hi"}], "temperature": -1, '
    for rest in (b'"tools": [%b]}' % tool, b'"stop": %b}' % nested):
        response = await face.http.post("/v1/chat/completions", content=head + rest, headers=JSON)
        assert response.status_code == 400


async def test_a_prompt_that_is_too_long_has_the_code_that_clients_know(face: Face) -> None:
    error = await face.refused(prompt="你" * 600)
    assert error["code"] == "context_length_exceeded"


async def test_another_model_is_not_found(face: Face) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await face.openai.completions.create(model="another", prompt="fox")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, 400, "invalid_request_error"),
        (grpc.StatusCode.UNAUTHENTICATED, 401, "authentication_error"),
        (grpc.StatusCode.PERMISSION_DENIED, 403, "permission_error"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, 429, "rate_limit_error"),
        (grpc.StatusCode.UNAVAILABLE, 503, "server_error"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, 504, "server_error"),
        (grpc.StatusCode.INTERNAL, 500, "server_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_keeps_its_status(
    face: Face, code: grpc.StatusCode, status: int, kind: str, stream: bool
) -> None:
    call = asyncio.create_task(face.post("/v1/completions", prompt="fox", stream=stream))
    await face.scheduler.refuse(code, "not now", field="n")
    response = await call
    assert response.status_code == status
    assert error_in(response) == {
        "message": "n: not now",
        "type": kind,
        "param": "n",
        "code": f"scheduler_{code.name}".lower(),
    }


async def test_an_overload_says_when_to_come_back(face: Face) -> None:
    call = asyncio.create_task(face.post("/v1/completions", prompt="fox"))
    delay = Duration(seconds=2, nanos=1)
    await face.scheduler.refuse(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", retry_delay=delay)
    response = await call
    assert (response.status_code, response.headers["retry-after"]) == (429, "3")


async def test_a_fault_of_ours_has_an_incident_and_no_more(
    face: Face, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(self: Inference) -> Any:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(Inference, "model", broken)
    response = await face.http.get("/v1/models")
    assert response.status_code == 500
    message = error_in(response)["message"]
    assert "secret" not in message
    assert message.rpartition(" ")[2] in caplog.text


async def test_every_answer_carries_a_request_id(face: Face) -> None:
    given = await face.http.get("/v1/models", headers={"X-Request-Id": "mine"})
    made = await face.http.get("/v1/nothing")
    unusable = await face.http.get("/v1/models", headers={"X-Request-Id": "x" * 129})
    assert given.headers["x-request-id"] == "mine"
    assert len(made.headers["x-request-id"]) == len(unusable.headers["x-request-id"]) == 32


SCHEMA = {"type": "array", "uniqueItems": True}
# Short, as the model of these tests has little context.
FUNCTION = {"name": "f", "parameters": {"properties": {"a": {"not": {}}}}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, "response_format"),
        ({"structured_outputs": {"json": SCHEMA}}, "structured_outputs"),
        ({"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"}, "tools"),
    ],
)
async def test_a_constraint_that_is_refused_is_named_as_it_was_given(
    face: Face, fields: dict[str, Any], param: str
) -> None:
    messages = [{"role": "user", "content": "fox"}]
    asked = asyncio.create_task(face.post("/v1/chat/completions", messages=messages, **fields))
    await face.scheduler.refuse(grpc.StatusCode.INVALID_ARGUMENT, "isn't supported", field="spec.constraint")
    response = await asked
    assert response.status_code == HTTPStatus.BAD_REQUEST
    assert error_in(response)["param"] == param
    assert error_in(response)["message"] == f"{param}: isn't supported"


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"json": "{"}, "structured_outputs.json"),
        ({"regex": ""}, "structured_outputs.regex"),
        ({"grammar": ""}, "structured_outputs.grammar"),
        ({"choice": ["fox", ""]}, "structured_outputs.choice[1]"),
    ],
)
async def test_the_part_of_a_constraint_at_fault_is_named(
    face: Face, given: dict[str, Any], param: str
) -> None:
    assert (await face.refused(prompt="fox", structured_outputs=given))["param"] == param
