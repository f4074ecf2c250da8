"""One stack per session for all tests that only ask; those that kill things start their own, tiny one."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.e2e.stack import Stack, launched
from tests.oracle import tiny_model
from tests.router.models import write_model


def connect(stack: Stack) -> openai.OpenAI:
    """OpenAI's own client; it tries nothing twice."""
    return openai.OpenAI(base_url=stack.url, api_key="none", max_retries=0, timeout=120)


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    """The embedded model, as `make serve` serves it."""
    with launched() as stack:
        stack.wait_ready()
        yield stack


@pytest.fixture(scope="session")
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    with connect(stack) as client:
        yield client


@pytest.fixture(scope="session")
def model(client: openai.OpenAI) -> str:
    (model,) = client.models.list().data
    return model.id


@pytest.fixture(scope="session")
def tiny_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of the tokenizer's size: nonsense, but within milliseconds."""
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    write_model(folder)
    tiny_model(folder, vocab_size=512, max_position_embeddings=2048, eos_token_id=1)
    return folder
