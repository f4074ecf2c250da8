"""The OpenAI-compatible API against real processes, with OpenAI's own clients."""

import json
import re
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.client import Answer, spec
from tests.e2e.conftest import connect
from tests.e2e.stack import ROOT, Stack, launched, until
from tests.tools import node_example

pytestmark = pytest.mark.e2e

STORY = "Once upon a time"


def test_both_faces_give_the_same_text(stack: Stack, client: openai.OpenAI, model: str) -> None:
    with stack.channel() as channel:
        expected = Answer(stack.stub(channel), spec(STORY, max_tokens=24)).finish()

    completion = client.completions.create(model=model, prompt=STORY, max_tokens=24, temperature=0)
    stream = client.completions.create(model=model, prompt=STORY, max_tokens=24, temperature=0, stream=True)

    assert completion.choices[0].text == expected.text
    assert "".join(chunk.choices[0].text for chunk in stream) == expected.text
    assert completion.usage
    assert completion.usage.completion_tokens == expected.usage.completion_tokens


def test_a_chat_is_answered_and_counted(client: openai.OpenAI, model: str) -> None:
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        temperature=0,
        max_completion_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = list(stream)

    assert "Paris" in "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert last.usage
    assert last.usage.total_tokens == last.usage.prompt_tokens + last.usage.completion_tokens


def test_the_same_seed_gives_the_same_outputs(client: openai.OpenAI, model: str) -> None:
    first, second = (
        client.completions.create(model=model, prompt=STORY, n=3, seed=7, max_tokens=12) for _ in range(2)
    )
    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in second.choices]
    assert len(set(texts)) > 1


def test_greedy_tokens_are_the_likeliest(client: openai.OpenAI, model: str) -> None:
    completion = client.completions.create(model=model, prompt=STORY, max_tokens=8, temperature=0, logprobs=2)
    (choice,) = completion.choices
    logprobs: Any = choice.logprobs
    assert "".join(logprobs.tokens) == choice.text
    for token, top in zip(logprobs.tokens, logprobs.top_logprobs, strict=True):
        assert max(top, key=top.get) == token


def test_the_log_probabilities_of_a_prompt_are_those_of_its_tokens(client: openai.OpenAI, model: str) -> None:
    """What was likely to be written is as likely to be read; in bfloat16, about as likely."""
    fields: Any = {"model": model, "temperature": 0, "logprobs": 0}
    written = client.completions.create(prompt=STORY, max_tokens=8, **fields).choices[0]
    read = client.completions.create(prompt=STORY + written.text, max_tokens=1, echo=True, **fields).choices[
        0
    ]

    start = len(STORY)
    assert read.text.startswith(STORY + written.text)
    count = len([offset for offset in read.logprobs.text_offset if offset < start])
    assert read.logprobs.tokens[count:-1] == written.logprobs.tokens
    assert read.logprobs.token_logprobs[count:-1] == pytest.approx(written.logprobs.token_logprobs, abs=0.2)
    assert read.logprobs.token_logprobs[0] is None


def test_a_token_that_is_banned_is_not_written(client: openai.OpenAI, model: str) -> None:
    fields: Any = {"model": model, "prompt": STORY, "max_tokens": 1, "temperature": 0}
    text = client.completions.create(**fields).choices[0].text
    url = str(client.base_url).removesuffix("/v1/")
    (token_id,) = tokens_of(url, text)

    other = client.completions.create(logit_bias={str(token_id): -100}, **fields).choices[0].text

    assert other != text


def tokens_of(url: str, text: str) -> list[int]:
    body = json.dumps({"prompt": text}).encode()
    request = urllib.request.Request(url + "/tokenize", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as response:
        tokens: list[int] = json.load(response)["tokens"]
    return tokens


def test_many_prompts_are_completed_side_by_side(client: openai.OpenAI, model: str) -> None:
    prompts = [f"{number}, {number + 1}," for number in range(8)]
    together = client.completions.create(model=model, prompt=prompts, max_tokens=6, temperature=0)
    alone = [
        client.completions.create(model=model, prompt=prompt, max_tokens=6, temperature=0).choices[0].text
        for prompt in prompts
    ]
    assert [choice.text for choice in together.choices] == alone


def test_best_of_is_the_best_of_them(client: openai.OpenAI, model: str) -> None:
    fields: Any = {"model": model, "prompt": STORY, "seed": 3, "max_tokens": 8, "logprobs": 0}
    every = client.completions.create(n=4, **fields).choices
    best = client.completions.create(n=1, best_of=4, **fields).choices[0]

    def mean(choice: Any) -> float:
        values = choice.logprobs.token_logprobs
        return float(sum(values) / len(values))

    assert best.text == max(every, key=mean).text


def test_what_is_refused_is_named(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=model, prompt=STORY, temperature=-1)
    assert caught.value.param == "temperature"


def test_a_client_that_goes_away_frees_its_blocks(tiny_model_folder: Path) -> None:
    with launched(f"--model={tiny_model_folder}") as stack:
        stack.wait_ready()
        with connect(stack) as client:
            stream = client.completions.create(
                model="", prompt=STORY, max_tokens=1900, stream=True, extra_body={"ignore_eos": True}
            )
            next(iter(stream))
            until(lambda: stack.used_blocks() > 0)

            stream.close()

            until(lambda: stack.used_blocks() == 0)


def test_running_streams_end_before_the_router_does(tiny_model_folder: Path) -> None:
    with launched(f"--model={tiny_model_folder}") as stack:
        stack.wait_ready()
        with connect(stack) as client:
            stream = client.completions.create(
                model="", prompt=STORY, max_tokens=300, stream=True, extra_body={"ignore_eos": True}
            )
            chunks = iter(stream)
            next(chunks)

            stack.process.terminate()
            stack.wait_line("Stopping")

            *_, last = chunks
            assert last.choices[0].finish_reason == "length"
        assert stack.process.wait(30) == 0


def test_no_http_is_served_where_none_is_wanted(tiny_model_folder: Path) -> None:
    with launched(f"--model={tiny_model_folder}", "--http-address=") as stack:
        stack.address = stack.wait_line(r"gRPC +(\S+)", 120)[1]
        assert "metrics" in stack.wait_line(r"^  \w+ +http")[0]
        with stack.channel() as channel:
            assert Answer(stack.stub(channel), spec(STORY, max_tokens=2)).finish().token_ids


def test_it_is_healthy(stack: Stack) -> None:
    with urllib.request.urlopen(stack.url.removesuffix("/v1") + "/health", timeout=10) as response:
        assert response.status == 200


def test_many_clients_are_served_at_once(client: openai.OpenAI, model: str) -> None:
    def ask(number: int) -> int:
        completion = client.completions.create(
            model=model, prompt=f"{number} is", max_tokens=8, extra_body={"ignore_eos": True}
        )
        assert completion.usage
        return completion.usage.completion_tokens

    with ThreadPoolExecutor(32) as pool:
        assert list(pool.map(ask, range(64))) == [8] * 64


def test_no_request_makes_it_fail(tiny_model_folder: Path, tmp_path: Path) -> None:
    """Bodies are made from the schemas that it publishes."""
    with launched(f"--model={tiny_model_folder}", "--max-model-len=256") as stack:
        stack.wait_ready()
        schemas = stack.url.removesuffix("/v1") + "/openapi.json"
        options = ["--checks=not_a_server_error", "--phases=fuzzing", "--max-examples=50", "--seed=1"]
        command = [sys.executable, "-m", "schemathesis.cli", "run", schemas, *options]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)

    assert done.returncode == 0, done.stdout


def node(example: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs an example as its first lines say."""
    command = (*node_example(example), *arguments)
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_the_example_for_node_prints_an_answer_and_its_usage(stack: Stack) -> None:
    result = node("openai.mjs", stack.url, "Say hello.")

    assert result.returncode == 0, result.stderr
    *text, usage = result.stdout.strip().splitlines()
    assert any(line.strip() for line in text)
    assert usage.endswith("completion tokens")


def test_the_example_for_tools_calls_one_and_prints_the_answer(stack: Stack) -> None:
    result = node("tools.mjs", stack.url, "What is the weather in Paris?")

    assert result.returncode == 0, result.stderr
    call, *answer = result.stdout.strip().splitlines()
    found = re.fullmatch(r"weather\((.*)\): It is (18 °C|64 °F) and sunny in (.*)\.", call)
    assert found
    assert json.loads(found[1])["city"] == found[3]
    assert answer


@pytest.mark.parametrize("example", ["openai.mjs", "tools.mjs"])
def test_an_example_for_node_without_a_server_says_so_in_one_line(example: str) -> None:
    result = node(example, "http://127.0.0.1:1/v1", "Say hello.")

    assert result.returncode == 1
    assert result.stderr == "APIConnectionError: Connection error.\n"
