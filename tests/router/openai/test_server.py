"""The HTTP server as a whole: what else it serves, how it bears many clients, how it ends."""

import asyncio
import contextlib
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator

from pagoda.v1 import inference_pb2
from router import metrics
from router.openai import server
from router.openai.server import MAX_HEADER_BYTES
from tests.router.fake_scheduler import STOP
from tests.router.openai.conftest import EOS, Face, ids


async def test_the_model_is_listed_and_found_by_name(face: Face) -> None:
    (model,) = (await face.openai.models.list()).data
    assert model == await face.openai.models.retrieve("tiny")
    assert (model.id, model.object) == ("tiny", "model")


async def test_text_is_tokenized_and_back(face: Face) -> None:
    there = (await face.post("/tokenize", prompt="quick 狐")).json()
    back = (await face.post("/detokenize", tokens=there["tokens"])).json()
    assert there == {"count": len(ids("quick 狐")), "max_model_len": 512, "tokens": ids("quick 狐")}
    assert back == {"prompt": "quick 狐"}


async def test_a_chat_is_tokenized_as_a_prompt(face: Face) -> None:
    answer = await face.post("/tokenize", messages=[{"role": "user", "content": "hi"}])
    assert answer.json()["tokens"] == ids("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "messages"),
        ("/tokenize", {"prompt": "fox", "add_special_tokens": False}, "add_special_tokens"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [420]}, "tokens[0]"),
    ],
)
async def test_what_can_not_be_tokenized_is_named(
    face: Face, path: str, fields: dict[str, Any], param: str
) -> None:
    assert (await face.refused(path, **fields))["param"] == param


async def test_it_is_healthy_while_a_scheduler_is_there(face: Face) -> None:
    assert (await face.http.get("/health")).status_code == 200
    await face.scheduler.stop()
    while face.grpc.router.replicas.connected:
        await face.grpc.router.replicas.wait_change()
    assert (await face.http.get("/health")).status_code == 503


async def test_the_paths_are_published_with_valid_schemas(face: Face) -> None:
    document = (await face.http.get("/openapi.json")).json()
    assert set(document["paths"]) == {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/models",
        "/v1/models/{model}",
        "/tokenize",
        "/detokenize",
        "/health",
    }
    for schema in document["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)


async def test_what_is_counted_from_the_start_is_served(face: Face) -> None:
    paths = (await face.http.get("/openapi.json")).json()["paths"]
    methods = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].methods_by_name
    assert {*paths, *methods} >= set(metrics.GENERATING)


async def test_no_header_tells_what_serves(face: Face) -> None:
    headers = (await face.http.get("/health")).headers
    assert {"server", "date"}.isdisjoint(headers)


async def test_headers_are_bounded(face: Face) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", face.port)
    writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: " + b"x" * MAX_HEADER_BYTES)
    assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
    writer.close()


async def test_a_connection_that_says_nothing_is_closed(
    start_face: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "KEEP_ALIVE_S", 0.01)
    face: Face = await start_face()
    reader, writer = await asyncio.open_connection("127.0.0.1", face.port)
    assert await reader.read() == b""
    writer.close()


async def test_a_connection_that_never_ends_its_headers_is_closed(
    start_face: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "HEAD_TIMEOUT_S", 0.01)
    face: Face = await start_face()
    reader, writer = await asyncio.open_connection("127.0.0.1", face.port)
    writer.write(b"GET /health HTTP/1.1\r\nHost:")
    assert await reader.read() == b""
    writer.close()


async def test_more_bytes_win_headers_no_time(start_face: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HEAD_TIMEOUT_S", 0.3)
    monkeypatch.setattr(server, "MAX_HEADER_BYTES", 2**30)
    face: Face = await start_face()
    reader, writer = await asyncio.open_connection("127.0.0.1", face.port)
    closed = asyncio.create_task(reader.read())
    async with asyncio.timeout(30):
        while not closed.done():
            writer.write(b"G")
            await asyncio.sleep(0)
    assert isinstance(closed.exception(), ConnectionResetError) or closed.result() == b""
    writer.close()


async def test_a_request_may_take_longer_than_its_headers(
    start_face: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "HEAD_TIMEOUT_S", 0.01)
    face: Face = await start_face()
    call = asyncio.create_task(face.post("/v1/completions", prompt="fox"))
    submit = await face.scheduler.accept()
    closed_meanwhile, writer = await asyncio.open_connection("127.0.0.1", face.port)
    writer.write(b"G")
    await closed_meanwhile.read()
    face.scheduler.send(submit, [*ids("dog"), EOS], STOP)
    assert (await call).status_code == 200
    writer.close()


@pytest.mark.parametrize("start", [b"", b"GET /x"])
async def test_connections_without_a_request_lock_nobody_out(
    start_face: Any, monkeypatch: pytest.MonkeyPatch, start: bytes
) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 4)
    face: Face = await start_face()
    async with contextlib.AsyncExitStack() as stack:
        readers = []
        for _ in range(6):
            reader, writer = await asyncio.open_connection("127.0.0.1", face.port)
            stack.callback(writer.close)
            writer.write(start)
            readers.append(reader)
        assert (await face.http.get("/health")).status_code == 200
        assert await readers[0].read() == b""


async def test_connections_with_requests_make_no_room(
    start_face: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 2)
    face: Face = await start_face()
    call = asyncio.create_task(face.post("/v1/completions", prompt="fox"))
    submit = await face.scheduler.accept()
    assert (await face.http.get("/health")).status_code == 503
    face.scheduler.send(submit, [*ids("dog"), EOS], STOP)
    assert (await call).status_code == 200


async def test_a_thousand_idle_connections_are_borne(face: Face) -> None:
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(1000):
            _, writer = await asyncio.open_connection("127.0.0.1", face.port)
            stack.callback(writer.close)
        assert (await face.http.get("/health")).status_code == 200


async def test_a_running_stream_may_end_while_the_router_drains(face: Face) -> None:
    idle_reader, idle_writer = await asyncio.open_connection("127.0.0.1", face.port)
    accepted = asyncio.create_task(face.scheduler.accept())
    body = {"prompt": "fox", "stream": True}
    async with face.http.stream("POST", "/v1/completions", json=body) as response:
        submit = await accepted
        draining = asyncio.create_task(face.grpc.router.drain())
        assert await idle_reader.read() == b""
        url = f"http://127.0.0.1:{face.port}"
        async with httpx.AsyncClient(base_url=url, timeout=60) as other:
            health = await other.get("/health")
            refused = await other.post("/v1/completions", json={"prompt": "fox"})
        face.scheduler.send(submit, [*ids("fox"), EOS], STOP)
        *_, last = [line async for line in response.aiter_lines() if line]
    idle_writer.close()
    assert last == "data: [DONE]"
    assert (health.status_code, health.headers["connection"]) == (503, "close")
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    await draining


async def test_a_router_that_has_drained_takes_no_connections(face: Face) -> None:
    port = face.port
    await face.grpc.router.drain()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)


async def test_a_stream_that_outlives_the_grace_is_told(start_face: Any) -> None:
    face: Face = await start_face(shutdown_grace=0.1)
    accepted = asyncio.create_task(face.scheduler.accept())
    body = {"prompt": "fox", "stream": True}
    async with face.http.stream("POST", "/v1/completions", json=body) as response:
        await accepted
        await face.grpc.router.drain()
        lines = [line async for line in response.aiter_lines() if line]
    assert lines[0] == "event: error"
    assert "shutting_down" in lines[1]
    assert "ask anew" in lines[1]


async def test_a_router_that_takes_no_more_says_so(face: Face) -> None:
    face.grpc.router.inference.refusing = True
    response = await face.post("/v1/completions", prompt="fox")
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
