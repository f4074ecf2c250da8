"""A router with its HTTP face, a fake scheduler behind it, and clients in front."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from pagoda.v1.sampling_pb2 import PositionLogprobs, TokenLogprob
from tests.router.conftest import Client, StartRouter
from tests.router.fake_scheduler import STOP, FakeScheduler
from tests.router.models import byte_level_bpe

TOKENIZER = byte_level_bpe()
EOS = 1
JSON = {"Content-Type": "application/json"}


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text).ids


@dataclass
class Face:
    """The HTTP face of a router.

    Attributes:
        openai: OpenAI's own client; it tries nothing twice.
        http: For what that client wouldn't send.
    """

    grpc: Client
    scheduler: FakeScheduler
    openai: AsyncOpenAI
    http: httpx.AsyncClient

    @property
    def port(self) -> int:
        assert self.grpc.router.http
        return self.grpc.router.http.port

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.http.post(path, json=body)

    async def refused(self, path: str = "/v1/completions", **body: Any) -> dict[str, Any]:
        """The error of a request that never reaches a scheduler."""
        response = await self.post(path, **body)
        assert response.status_code == 400, response.text
        error: dict[str, Any] = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error


@pytest.fixture
async def start_face(start_router: StartRouter) -> AsyncIterator[Any]:
    opened: list[Any] = []

    async def start(**config: Any) -> Face:
        client = await start_router(http_address="127.0.0.1:0", **config)
        assert client.router.http
        url = f"http://127.0.0.1:{client.router.http.port}"
        # A timeout that no test waits for.
        http = httpx.AsyncClient(base_url=url, timeout=60)
        openai = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
        opened.extend([http.aclose, openai.close])
        return Face(client, client.scheduler, openai, http)

    yield start
    for close in opened:
        await close()


@pytest.fixture
async def face(start_face: Any) -> Face:
    started: Face = await start_face()
    return started


async def answer(face: Face, text: str, output_index: int = 0, **accepted: Any) -> Any:
    """Accepts the next submit and answers it with a text; returns the submit."""
    submit = await face.scheduler.accept()
    face.scheduler.send(submit, [*ids(text), EOS], STOP, output_index=output_index, **accepted)
    return submit


def position(token_id: int, logprob: float, *others: tuple[int, float]) -> PositionLogprobs:
    """The chosen token, and the likeliest, where they were asked for: itself and others."""
    chosen = TokenLogprob(token_id=token_id, logprob=logprob)
    top = [TokenLogprob(token_id=other, logprob=value) for other, value in others]
    return PositionLogprobs(chosen=chosen, top=[chosen, *top] if top else [])
