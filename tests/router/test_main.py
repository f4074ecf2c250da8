"""The real process."""

import asyncio
import signal
import socket
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from pagoda.v1 import inference_pb2 as pb
from pagoda.v1.inference_pb2_grpc import InferenceServiceStub
from tests.router.fake_scheduler import LENGTH, FakeScheduler

SCHEDULER = "--scheduler-addresses=127.0.0.1:1"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "router", "--metrics-address=127.0.0.1:0", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=30)


def test_router_needs_neither_torch_nor_transformers() -> None:
    code = "import sys, router.__main__; print({'torch', 'transformers', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.stdout == "set()\n"


def test_a_broken_model_folder_is_one_line_and_status_2(tmp_path: Path) -> None:
    done = run(f"--model={tmp_path}", SCHEDULER)
    assert done.returncode == 2
    assert done.stderr == f"python -m router: {tmp_path}/config.json: no such file\n"
    assert done.stdout == ""


@pytest.mark.parametrize("flag", ["--listen-address", "--http-address", "--metrics-address"])
def test_a_port_in_use_is_one_line_and_status_2(model_folder: Path, flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        free = ("--listen-address=127.0.0.1:0", "--http-address=127.0.0.1:0")
        done = run(f"--model={model_folder}", SCHEDULER, *free, f"{flag}={address}")
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("python -m router")]
    assert line.startswith(f"python -m router: {flag} {address}: ")


def test_what_is_required_is_said() -> None:
    done = run()
    assert done.returncode == 2
    assert "--model" in done.stderr


async def test_sigterm_lets_a_running_request_end_and_exits_0(
    model_folder: Path, fake: FakeScheduler, request: pytest.FixtureRequest
) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "router",
        f"--model={model_folder}",
        f"--scheduler-addresses={fake.address}",
        "--listen-address=127.0.0.1:0",
        "--http-address=127.0.0.1:0",
        "--metrics-address=127.0.0.1:0",
        stderr=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None

    def end() -> None:
        if process.returncode is None:
            process.kill()

    request.addfinalizer(end)
    seen = b""
    while b"listening on " not in seen:
        seen = await process.stderr.readline()
        assert seen
    address = seen.decode().split()[-1]
    await fake.hellos.get()
    async with grpc.aio.insecure_channel(address) as channel:
        stub = InferenceServiceStub(channel)
        call = stub.Generate(
            pb.GenerateRequest(spec=pb.GenerateSpec(text="fox")), wait_for_ready=True, timeout=20
        )
        submit = await fake.accept()
        process.send_signal(signal.SIGTERM)
        while b"draining" not in seen:
            seen = await process.stderr.readline()
            assert seen
        fake.send(submit, list(submit.prompt_token_ids), LENGTH)
        assert (await call).outputs[0].text == "fox"
    out, err = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == 0
    assert out == b""
    assert b"Traceback" not in err
