"""What may happen to a stream, and to a client that waits: it goes away, stalls, takes too long."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import httpx
import openai
import pytest

from router import metrics
from router.openai import calls, server, streaming
from tests.router.fake_scheduler import STOP
from tests.router.openai.conftest import EOS, JSON, Face, ids


@asynccontextmanager
async def streamed(face: Face, **fields: Any) -> AsyncIterator[Any]:
    """The lines of a stream, and the submit that it made."""
    body = {"prompt": "fox", "stream": True, **fields}
    submitted = asyncio.create_task(face.scheduler.accept())
    async with face.http.stream("POST", "/v1/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        yield response.aiter_lines(), await submitted


async def rest(lines: AsyncIterator[str]) -> list[str]:
    return [line async for line in lines if line]


def counted(code: str) -> Any:
    return metrics.REQUESTS.labels("/v1/completions", code)._value.get()


async def test_a_stream_is_events_and_ends_with_done(face: Face) -> None:
    async with streamed(face) as (lines, submit):
        face.scheduler.send(submit, [*ids("fox"), EOS], STOP)
        *chunks, last = await rest(lines)
    assert last == "data: [DONE]"
    assert all(json.loads(chunk.removeprefix("data: "))["object"] == "text_completion" for chunk in chunks)


async def test_a_failure_in_the_middle_is_an_event_and_the_end(face: Face) -> None:
    before = counted("INTERNAL")
    async with streamed(face) as (lines, submit):
        face.scheduler.send(submit, ids("fox"))
        await anext(lines)
        face.scheduler.refuse_key(submit, grpc.StatusCode.INTERNAL, "broken")
        *_, kind, data = await rest(lines)
    assert kind == "event: error"
    assert json.loads(data.removeprefix("data: "))["error"]["message"] == "broken"
    await face.grpc.router.inference.calls.wait_idle()
    assert counted("INTERNAL") == before + 1


async def test_openais_client_raises_what_fails_in_the_middle(face: Face) -> None:
    call = asyncio.create_task(face.openai.completions.create(model="tiny", prompt="fox", stream=True))
    submit = await face.scheduler.accept()
    face.scheduler.refuse_key(submit, grpc.StatusCode.INTERNAL, "broken")
    stream = await call
    with pytest.raises(openai.APIError, match="broken"):
        await anext(aiter(stream))


async def test_something_is_sent_while_nothing_comes(face: Face, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "KEEP_ALIVE_S", 0.01)
    async with streamed(face) as (lines, _):
        assert await anext(lines) == ": keep-alive"


async def test_a_client_that_goes_away_frees_its_stream(face: Face) -> None:
    before = counted("CANCELLED")
    async with streamed(face) as (lines, submit):
        face.scheduler.send(submit, ids("fox"))
        await anext(lines)
    assert (await face.scheduler.aborts.get()).key == submit.key
    await face.grpc.router.inference.calls.wait_idle()
    assert counted("CANCELLED") == before + 1


async def test_a_client_that_goes_away_frees_what_it_waited_for(face: Face) -> None:
    call = asyncio.create_task(face.post("/v1/completions", prompt=["fox", "dog"]))
    keys = [(await face.scheduler.accept()).key.request_id for _ in range(2)]
    call.cancel()
    assert sorted([(await face.scheduler.aborts.get()).key.request_id for _ in range(2)]) == keys


async def test_a_client_that_stops_reading_is_ended(start_face: Any) -> None:
    face: Face = await start_face(write_stall_timeout=0.2)
    before = counted("RESOURCE_EXHAUSTED")
    body = json.dumps({"prompt": "fox", "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", face.port))
        client.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
        submit = await face.scheduler.accept()
        # More than the buffers of both ends hold.
        long = ids("<tool call>") * 500_000
        while face.scheduler.aborts.empty():
            face.scheduler.send(submit, long)
            await asyncio.sleep(0.05)
    assert (await face.scheduler.aborts.get()).key == submit.key
    await face.grpc.router.inference.calls.wait_idle()
    assert counted("RESOURCE_EXHAUSTED") == before + 1


async def test_an_answer_that_takes_too_long_is_a_timeout(start_face: Any) -> None:
    face: Face = await start_face(request_timeout=0.3)
    response = asyncio.create_task(face.post("/v1/completions", prompt="fox"))
    submit = await face.scheduler.accept()
    error = (await response).json()["error"]

    assert (await response).status_code == 504
    assert "0.3 s" in error["message"]
    assert 0 < submit.deadline_remaining.ToTimedelta().total_seconds() <= 0.3
    assert (await face.scheduler.aborts.get()).key == submit.key


async def test_a_stream_that_takes_too_long_ends_with_an_error(start_face: Any) -> None:
    face: Face = await start_face(request_timeout=0.5)
    async with streamed(face) as (lines, submit):
        face.scheduler.send(submit, ids("fox"))
        *_, kind, data = await rest(lines)
    assert kind == "event: error"
    assert json.loads(data.removeprefix("data: "))["error"]["code"] == "request_timeout"


async def test_a_body_that_never_ends_is_a_timeout(face: Face, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "BODY_TIMEOUT_S", 0.2)
    never = asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        yield b"{"
        await never.wait()

    request = face.http.build_request("POST", "/v1/completions", content=body(), headers=JSON)
    sent = asyncio.create_task(face.http.send(request))
    await asyncio.wait({sent}, timeout=1)
    never.set()
    response: httpx.Response = await sent
    assert response.status_code == 408
    assert "1 bytes" in response.json()["error"]["message"]


async def test_a_body_that_drips_is_a_timeout(face: Face, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "BODY_TIMEOUT_S", 0.2)
    monkeypatch.setattr(server, "HEAD_TIMEOUT_S", 0.2)
    reader, writer = await asyncio.open_connection("127.0.0.1", face.port)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    writer.write(head + b"Content-Length: 1000000\r\n\r\n")
    answered = asyncio.create_task(reader.read())
    async with asyncio.timeout(30):
        while not answered.done():
            writer.write(b" ")
            await asyncio.sleep(0.01)
    writer.close()
    assert answered.result().startswith(b"HTTP/1.1 408 ")


async def test_a_large_body_has_longer(face: Face, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "BODY_TIMEOUT_S", 1)
    monkeypatch.setattr(calls, "MIN_BODY_BYTES_PER_S", 1)

    async def body() -> AsyncIterator[bytes]:
        yield b'{"prompt": "' + b"x" * 1000
        await asyncio.sleep(1.5)
        yield b'"}'

    response = await face.http.post("/tokenize", content=body(), headers=JSON)
    assert response.status_code == 200


async def test_lost_schedulers_are_borne(face: Face) -> None:
    async with streamed(face) as (lines, submit):
        (japan,) = ids("日本")
        face.scheduler.send(submit, [japan])
        await anext(lines)
        face.scheduler.drop()
        again = await face.scheduler.accept()
        face.scheduler.send(again, [japan, EOS], STOP)
        *_, done = await rest(lines)
    assert list(again.prior_outputs[0].token_ids) == [japan]
    assert done == "data: [DONE]"
