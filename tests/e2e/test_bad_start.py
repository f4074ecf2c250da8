"""What can't be served is said in one line, at once, with exit status 2."""

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.stack import ROOT

pytestmark = pytest.mark.e2e

FREE = ("--listen-address=127.0.0.1:0", "--metrics-address=127.0.0.1:0")


def start(process: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", process, *flags]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def assert_refused(done: subprocess.CompletedProcess[str], *texts: str) -> None:
    assert done.returncode == 2, done
    assert "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    for text in texts:
        assert text in last


def truncate(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def claim_another_architecture(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["MambaForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config))


def break_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def drop_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("harm", "texts"),
    [
        (truncate, ("model.safetensors",)),
        (
            claim_another_architecture,
            ("MambaForCausalLM", "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"),
        ),
        (break_config, ("config.json",)),
        (drop_weights, ("model.safetensors",)),
        (shutil.rmtree, ()),
    ],
)
def test_a_model_that_can_not_be_served(
    tiny_model_folder: Path, tmp_path: Path, harm: Callable[[Path], None], texts: tuple[str, ...]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model_folder, folder)
    harm(folder)

    assert_refused(start("shard", f"--model={folder}", *FREE), str(folder), *texts)


@pytest.mark.parametrize(
    "content",
    [b"", b"GGUF", b"not a model" * 1000, b"GGUF\x03\0\0\0" + b"\xff" * 64],
    ids=["empty", "magic alone", "another file", "absurd counts"],
)
def test_a_corrupt_gguf_file(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(content)

    assert_refused(start("shard", f"--model={file}", *FREE), str(file))
    ports = [f"--{process}-metrics-address=127.0.0.1:0" for process in ("router", "scheduler", "shard")]
    ports += ["--listen-address=127.0.0.1:0", "--http-address=127.0.0.1:0"]
    served = start("launcher", "serve", f"--model={file}", *ports)
    assert_refused(served, str(file))


@pytest.mark.parametrize("process", ["router", "scheduler", "shard"])
@pytest.mark.parametrize("flag", ["listen", "metrics"])
def test_a_port_in_use_is_named(process: str, flag: str, tiny_model_folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        flags = {
            "router": (
                f"--model={tiny_model_folder}",
                "--scheduler-addresses=127.0.0.1:1",
                "--http-address=127.0.0.1:0",
            ),
            "scheduler": ("--shard-addresses=127.0.0.1:1",),
            "shard": (f"--model={tiny_model_folder}",),
        }[process]

        done = start(process, *flags, *FREE, f"--{flag}-address={address}")

        assert_refused(done, f"--{flag}-address {address}: ", "in use")


@pytest.mark.parametrize(
    ("process", "flags", "texts"),
    [
        ("scheduler", (), ("--shard-addresses", "is required")),
        ("scheduler", ("--shard-addresses=nowhere",), ("--shard-addresses 'nowhere'", "HOST:PORT")),
        ("scheduler", ("--shard-addresses=127.0.0.1:1,b",), ("--shard-addresses 'b'", "HOST:PORT")),
        ("scheduler", ("--shard-addresses=a:1", "--block-size=0"), ("--block-size", "at least 1")),
        ("scheduler", ("--shard-addresses=a:1", "--max-num-batched-tokens=99999999999"), ("at most",)),
        ("shard", ("--model=x", "--kv-cache-memory-bytes=99999999999999999999"), ("at most", "bytes")),
        ("shard", (), ("--model", "is required")),
        ("shard", ("--model=x", "--dtype=int3"), ("--dtype", "int3", "float32")),
        ("router", ("--model=x", "--scheduler-addresses=:"), ("--scheduler-addresses", "HOST:PORT")),
        ("router", ("--model=x", "--scheduler-addresses=a:1", "--shutdown-grace=nan"), ("--shutdown-grace",)),
    ],
)
def test_a_bad_flag_is_named_with_its_limit(
    process: str, flags: tuple[str, ...], texts: tuple[str, ...]
) -> None:
    assert_refused(start(process, *flags), *texts)


def test_a_gateway_s_address_needs_a_model_folder(tmp_path: Path) -> None:
    flags = ("--shard-addresses=127.0.0.1:1", *FREE, "--gateway-address=127.0.0.1:0")

    assert_refused(start("scheduler", *flags), "--gateway-address needs --model")
    assert_refused(start("scheduler", *flags, f"--model={tmp_path}"), "config.json: no such file")


def test_a_gateway_s_address_needs_its_protocol(tiny_model_folder: Path) -> None:
    without = "import sys; sys.modules['smg_grpc_proto'] = None; from scheduler.server import main; main()"
    flags = ("--shard-addresses=127.0.0.1:1", *FREE, "--gateway-address=127.0.0.1:0")
    command = [sys.executable, "-c", without, *flags, f"--model={tiny_model_folder}"]

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)

    assert_refused(done, "--gateway-address needs the Python package smg_grpc_proto: pip install")


def test_a_scheduler_says_that_it_waits_for_its_shard() -> None:
    command = [sys.executable, "-m", "scheduler", "--shard-addresses=127.0.0.1:1", *FREE]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr
            line = process.stderr.readline()
        finally:
            process.terminate()
        assert process.wait(20) == 0
    assert "waiting for 127.0.0.1:1: " in line
    assert "UNAVAILABLE" in line


def test_a_wrong_scheduler_setting_is_said_once_and_last(tiny_model_folder: Path) -> None:
    ports = [f"--{process}-metrics-address=127.0.0.1:0" for process in ("router", "scheduler", "shard")]
    flags = (f"--model={tiny_model_folder}", "--listen-address=127.0.0.1:0", "--max-model-len=100000")

    done = start("launcher", "serve", *flags, *ports)

    assert done.returncode == 2
    assert done.stderr.count("--max-model-len 100000 is above the 2048 tokens of the model") == 1
    assert "Traceback" not in done.stderr
    assert done.stdout.splitlines()[-1].startswith("scheduler refused its configuration")
