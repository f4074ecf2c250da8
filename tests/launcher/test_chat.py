"""The terminal client against a server that answers with what it was asked."""

import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest

from common.rpc import bind
from common.tls import server_tls
from launcher.preflight import ROOT
from pagoda.v1 import inference_pb2 as pb
from pagoda.v1.inference_pb2_grpc import InferenceServiceServicer, add_InferenceServiceServicer_to_server
from tests.authority import Authority

CONTEXT = 64


class Echo(InferenceServiceServicer):
    """Answers with how many messages it saw and the last one; the words "hang" and "busy" do as they say."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()
        self.authorization: str | None = None

    def GetModel(self, request: pb.GetModelRequest, context: Any) -> pb.GetModelResponse:  # noqa: N802
        self.authorization = dict(context.invocation_metadata()).get("authorization")
        if self.authorization == "Bearer wrong":
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "no valid API key")
        return pb.GetModelResponse(name="echo", max_model_len=CONTEXT, chat=True)

    def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:  # noqa: N802
        count = sum(len(message.content.split()) for message in request.chat.messages)
        return pb.TokenizeResponse(token_ids=range(count))

    def GenerateStream(  # noqa: N802
        self, request: pb.GenerateStreamRequest, context: Any
    ) -> Iterator[pb.GenerateStreamResponse]:
        messages = request.spec.chat.messages
        said = messages[-1].content
        if said == "busy":
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "64 requests wait already")
        # Before the client sees anything: it may cancel as soon as it does.
        context.add_callback(self.cancelled.set)
        yield pb.GenerateStreamResponse(accepted=pb.Accepted(request_id="1"))
        yield pb.GenerateStreamResponse(delta=pb.OutputDelta(text=f"{len(messages)}: "))
        if said == "hang":
            self.cancelled.wait(60)
        yield pb.GenerateStreamResponse(delta=pb.OutputDelta(text=f"\x1b[31m{said}"))
        yield pb.GenerateStreamResponse(usage=pb.Usage())

    def Generate(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise NotImplementedError

    def Detokenize(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise NotImplementedError


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.fixture
def address(echo: Echo) -> Iterator[str]:
    server = grpc.server(futures.ThreadPoolExecutor(4))
    add_InferenceServiceServicer_to_server(echo, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


def chat(*arguments: str, stdin: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "launcher", "chat", *arguments],
        cwd=ROOT,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environ},
    )


def test_one_prompt_gets_one_answer_on_standard_output(address: str) -> None:
    result = chat("--address", address, "--prompt", "hello", "--system", "be kind")

    assert (result.returncode, result.stdout, result.stderr) == (0, "2: [31mhello\n", "")


def test_a_key_from_the_environment_is_sent_over_tls(echo: Echo, tmp_path: Path) -> None:
    ca = Authority(tmp_path)
    server = grpc.server(futures.ThreadPoolExecutor(4))
    add_InferenceServiceServicer_to_server(echo, server)
    address = f"127.0.0.1:{bind(server, '127.0.0.1:0', server_tls(*ca.issue('server'), ca.file))}"
    server.start()
    client = ca.issue("client")
    tls = ["--tls-ca-file", ca.file, "--tls-cert-file", client.certificate, "--tls-key-file", client.key]

    result = chat("--address", address, *map(str, tls), "--prompt", "hello", PAGODA_CHAT_API_KEY="secret")

    assert (result.returncode, result.stdout) == (0, "1: [31mhello\n")
    assert echo.authorization == "Bearer secret"
    server.stop(None).wait()


def test_a_wrong_key_is_one_line(address: str) -> None:
    result = chat("--address", address, "--prompt", "hello", PAGODA_CHAT_API_KEY="wrong")

    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == (
        "python -m launcher chat: give a key of this server in PAGODA_CHAT_API_KEY (no valid API key)\n"
    )


def test_a_missing_ca_file_is_one_line(address: str) -> None:
    result = chat("--address", address, "--prompt", "hello", "--tls-ca-file", "/nowhere")

    assert result.returncode == 2
    assert result.stderr == "python -m launcher chat: --tls-ca-file /nowhere: No such file or directory\n"


def test_a_conversation_remembers_until_reset(address: str) -> None:
    result = chat("--address", address, stdin="a\nb\n/reset\nc\n/help\n/nothing\n")

    assert result.returncode == 0
    assert result.stdout.split("\n")[:3] == ["1: [31ma", "3: [31mb", "1: [31mc"]
    assert "/reset  forget the conversation" in result.stderr
    assert "/nothing is no command" in result.stderr


def test_old_messages_are_forgotten_aloud(address: str) -> None:
    result = chat("--address", address, "--max-tokens", "50", stdin=f"{'a ' * 10}\nb c\n")

    assert result.stdout.split("\n")[1] == "1: [31mb c"
    assert f"2 messages are forgotten: {CONTEXT} tokens hold no more." in result.stderr


def test_a_refusal_is_one_line_and_the_conversation_goes_on(address: str) -> None:
    result = chat("--address", address, stdin="busy\na\n")

    assert result.returncode == 1
    assert "the server is busy; ask again in a moment (64 requests wait already)" in result.stderr
    assert result.stdout.startswith("1: [31ma\n")


def test_closed_standard_streams_are_the_null_device(address: str) -> None:
    command = [sys.executable, "-m", "launcher", "chat", "--address", address]
    script = shlex.join(command)

    for closing in ("<&-", ">&-", "2>&-", "<&- >&- 2>&-"):
        result = subprocess.run(
            ["bash", "-c", f"{script} {closing}"],
            cwd=ROOT,
            input="a\n",
            capture_output=True,
            text=True,
            timeout=60,
        )

        assert result.returncode == 0, result.stderr
        assert "Traceback" not in result.stderr
        assert ("1: " in result.stdout) == (closing == "2>&-")


def test_no_server_names_the_address_and_what_to_do() -> None:
    result = chat("--address", "127.0.0.1:1", "--prompt", "hello")

    assert result.returncode == 1
    assert result.stderr == (
        "python -m launcher chat: no server at 127.0.0.1:1: start one with `make serve`, "
        "or name another with --address\n"
    )


def test_control_c_cancels_the_answer(address: str, echo: Echo) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "launcher", "chat", "--address", address, "--prompt", "hang"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert os.read(process.stdout.fileno(), 3) == b"1: "

        process.send_signal(signal.SIGINT)

        assert process.wait(timeout=30) == 130
    assert echo.cancelled.wait(10)
