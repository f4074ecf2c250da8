"""The SMG gateway in front of Pagoda's scheduler: its HTTP API, whose answers are those of our router."""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from pagoda.v1 import inference_pb2 as pb
from tests.e2e.client import spec
from tests.e2e.stack import Stack, launched, until

pytestmark = pytest.mark.e2e

MODEL = "tiny-llama"
MAX_NUM_SEQS = 4
PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def served(tiny_model_folder: Path) -> Iterator[tuple[Stack, str]]:
    """A stack, and where the scheduler waits for a gateway."""
    flags = ("--gateway-address=127.0.0.1:0", f"--max-num-seqs={MAX_NUM_SEQS}")
    with launched(f"--model={tiny_model_folder}", *flags) as stack:
        stack.wait_ready()
        yield stack, stack.printed(r"gateway +(grpc://\S+)")


@pytest.fixture
def stack(served: tuple[Stack, str]) -> Stack:
    return served[0]


@pytest.fixture(scope="module")
def client(served: tuple[Stack, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """A client of the gateway, once that knows the model."""
    port, metrics_port = free_ports(2)
    flags = ("--host=127.0.0.1", f"--port={port}", "--worker-urls", served[1])
    metrics = ("--prometheus-host=127.0.0.1", f"--prometheus-port={metrics_port}")
    log = tmp_path_factory.mktemp("gateway") / "log"
    with log.open("w") as output:
        gateway = subprocess.Popen(
            [sys.executable, "-m", "smg", "launch", *flags, *metrics, "--disable-retries"],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
    address = f"http://127.0.0.1:{port}/v1"
    try:

        def answers() -> bool:
            assert gateway.poll() is None, log.read_text()
            question = {"model": MODEL, "prompt": "x", "max_tokens": 1}
            try:
                return httpx.post(f"{address}/completions", json=question).is_success
            except httpx.TransportError:
                return False

        until(answers, timeout_s=60)
        yield openai.OpenAI(base_url=address, api_key="none", max_retries=0)
    finally:
        gateway.kill()
        gateway.wait(20)


def free_ports(count: int) -> list[int]:
    """The gateway takes no port 0."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def of_the_router(stack: Stack, request: pb.GenerateSpec) -> pb.GenerateResponse:
    with stack.channel() as channel:
        return stack.stub(channel).Generate(pb.GenerateRequest(spec=request), timeout=60)


def complete(client: openai.OpenAI, **params: Any) -> Any:
    return client.completions.create(model=MODEL, prompt=PROMPT, **params)


def test_the_model_is_the_one_that_is_served(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


def test_a_chat_is_that_of_the_router(client: openai.OpenAI, stack: Stack) -> None:
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="Why?")])
    request = spec(max_tokens=24, ignore_eos=False)
    request.chat.CopyFrom(chat)
    ours = of_the_router(stack, request)

    theirs = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Why?"}], max_tokens=24, temperature=0
    )

    assert theirs.choices[0].message.content == ours.outputs[0].text
    assert theirs.usage
    assert theirs.usage.prompt_tokens == ours.usage.prompt_tokens
    assert theirs.usage.completion_tokens == ours.usage.completion_tokens


def test_a_stream_brings_the_same_text_in_pieces(client: openai.OpenAI, stack: Stack) -> None:
    ours = of_the_router(stack, spec(PROMPT, max_tokens=40))

    pieces = list(
        complete(client, max_tokens=40, temperature=0, stream=True, stream_options={"include_usage": True})
    )

    texts = [choice.text for piece in pieces for choice in piece.choices]
    assert len([text for text in texts if text]) > 1
    assert "".join(texts) == ours.outputs[0].text
    assert pieces[-1].usage.completion_tokens == ours.usage.completion_tokens


def test_a_seed_draws_the_same_outputs(client: openai.OpenAI, stack: Stack) -> None:
    request = spec(PROMPT, max_tokens=16, temperature=1, seed=7)
    request.n = 3
    ours = of_the_router(stack, request)

    theirs = complete(client, max_tokens=16, temperature=1, seed=7, n=3)

    texts = [output.text for output in ours.outputs]
    assert len(set(texts)) == 3
    assert [choice.text for choice in sorted(theirs.choices, key=lambda one: one.index)] == texts


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_work_too(client: openai.OpenAI, stack: Stack, stream: bool) -> None:
    whole = of_the_router(stack, spec(PROMPT, max_tokens=200)).outputs[0].text
    # Neither side of which is in the middle of a character.
    stop = re.findall("[a-z]{4}", whole)[1]
    ours = of_the_router(stack, spec(PROMPT, max_tokens=200, strings=[stop]))
    options: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream else {}

    answer = complete(client, max_tokens=200, temperature=0, stop=stop, stream=stream, **options)

    pieces = list(answer) if stream else [answer]
    choices = [choice for piece in pieces for choice in piece.choices]
    assert "".join(choice.text for choice in choices) == ours.outputs[0].text
    assert choices[-1].finish_reason == "stop"
    assert pieces[-1].usage.completion_tokens == ours.usage.completion_tokens < 200


def test_a_client_that_leaves_frees_the_blocks(client: openai.OpenAI, stack: Stack) -> None:
    answer = complete(client, max_tokens=1500, temperature=0, stream=True, extra_body={"ignore_eos": True})
    next(iter(answer))
    assert stack.used_blocks() > 0

    answer.close()

    until(lambda: stack.used_blocks() == 0)


def test_a_refusal_keeps_its_status_and_its_words(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=f"n: 5 is above max_num_seqs, which is {MAX_NUM_SEQS}"):
        complete(client, max_tokens=2, n=5)
