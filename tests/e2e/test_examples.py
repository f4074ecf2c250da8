"""The examples run as their first lines say, against real processes."""

import math
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any, NoReturn, Protocol

import grpc
import pytest

from router.errors import invalid, unavailable
from tests.e2e.go_example import go, go_example
from tests.tools import node_example

ROOT = Path(__file__).parents[2]
PROMPT = "Say hello."

pytestmark = pytest.mark.e2e


class Stack(Protocol):
    """Router, scheduler and shard, all running."""

    address: str


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def example(name: str) -> tuple[str, ...]:
    """The command line that an example's first lines give, without its arguments."""
    if name == "go":
        return go_example()
    if name == "node":
        return node_example("stream.mjs")
    if name == "reflection":
        return (sys.executable, "examples/python/reflection.py")
    return (sys.executable, "-m", f"examples.python.{name}")


NAMES = ["generate", "stream_asyncio", "reflection", "node", "go"]


@pytest.mark.parametrize("name", NAMES)
def test_an_example_prints_an_answer_and_its_usage(stack: Stack, name: str) -> None:
    result = run(*example(name), stack.address, PROMPT)

    assert result.returncode == 0, result.stderr
    *text, usage = result.stdout.strip().splitlines()
    assert any(line.strip() for line in text)
    assert usage.endswith("completion tokens")


@pytest.mark.parametrize("name", NAMES)
def test_an_example_without_a_server_says_so_in_one_line(name: str) -> None:
    result = run(*example(name), "127.0.0.1:1", PROMPT)

    assert result.returncode == 1
    assert result.stderr.startswith("UNAVAILABLE: ")
    assert result.stderr.count("\n") == 1


@contextmanager
def served(router: grpc.GenericRpcHandler) -> Iterator[str]:  # type: ignore[type-arg]
    """Its address."""
    server = grpc.server(ThreadPoolExecutor(2), handlers=[router])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0)


class Reluctant(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """A router that isn't there yet for two calls, and then refuses for good."""

    def __init__(self) -> None:
        self.calls = 0

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        if details.method.endswith("Stream"):
            return grpc.unary_stream_rpc_method_handler(self._refuse)
        return grpc.unary_unary_rpc_method_handler(self._refuse)

    def _refuse(self, _: bytes, context: grpc.ServicerContext) -> NoReturn:
        self.calls += 1
        error = unavailable("not yet") if self.calls <= 2 else invalid("spec.chat", "is rude")
        context.abort_with_status(error.status())


@pytest.mark.parametrize("name", ["generate", "stream_asyncio", "node", "go"])
def test_an_example_tries_again_and_shows_the_details_of_an_error(name: str) -> None:
    router = Reluctant()
    with served(router) as address:
        result = run(*example(name), address, PROMPT)

    assert (result.returncode, router.calls) == (1, 3)
    assert result.stderr.splitlines() == [
        "INVALID_ARGUMENT: spec.chat: is rude",
        "  reason: INVALID_FIELD",
        "  field: spec.chat",
    ]


def test_several_prompts_are_answered_at_once(stack: Stack) -> None:
    result = run(*example("stream_asyncio"), stack.address, "Say one.", "Say two.")

    assert result.stdout.count("completion tokens") == 2


class Endless(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """A router that takes a stream, and never sends anything."""

    def __init__(self) -> None:
        self.time_remaining = math.inf
        self.called = Event()
        self.ended = Event()

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        return grpc.unary_stream_rpc_method_handler(self._wait)

    def _wait(self, _: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        self.time_remaining = context.time_remaining()
        context.add_callback(self.ended.set)
        self.called.set()
        self.ended.wait(60)
        yield from ()


@pytest.mark.parametrize("name", ["stream_asyncio", "node", "go"])
def test_an_interrupt_cancels_the_call_of_an_example_before_its_deadline(name: str) -> None:
    router = Endless()
    command = example(name)
    with served(router) as address, subprocess.Popen([*command, address, PROMPT], cwd=ROOT) as client:
        assert router.called.wait(60)
        client.send_signal(signal.SIGINT)

        assert client.wait(30) == 130
        assert router.ended.wait(30)
    assert router.time_remaining <= 60


@pytest.mark.parametrize("command", [("gofmt", "-l", "."), ("go", "vet")])
def test_the_example_for_go_is_in_order(command: tuple[str, ...]) -> None:
    go_example()

    result = go(*command)

    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
