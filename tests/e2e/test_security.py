"""The three processes by hand, with certificates between all of them and an API key."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import pytest

from common import rpc
from common.tls import ClientTls, client_tls
from launcher.preflight import claim_addresses
from pagoda.v1 import inference_pb2 as pb
from pagoda.v1.inference_pb2_grpc import InferenceServiceStub
from router.auth import digest, new_key
from tests.authority import Authority, Pair
from tests.docs.pages import blocks
from tests.e2e.client import spec, status
from tests.e2e.stack import PROCESSES, ROOT, launched, until

pytestmark = pytest.mark.e2e

KEY = new_key()


def server_flags(pair: Pair, ca: Authority) -> list[str]:
    return [
        f"--tls-cert-file={pair.certificate}",
        f"--tls-key-file={pair.key}",
        f"--tls-client-ca-file={ca.file}",
    ]


def client_flags(peer: str, pair: Pair, ca: Authority) -> list[str]:
    return [
        f"--{peer}-tls-ca-file={ca.file}",
        f"--{peer}-tls-cert-file={pair.certificate}",
        f"--{peer}-tls-key-file={pair.key}",
        f"--{peer}-tls-server-name=localhost",
    ]


def keys_file(folder: Path) -> Path:
    file = folder / "keys.yaml"
    file.write_text(f'- id: "acme"\n  key_sha256: "{digest(KEY)}"\n')
    return file


@contextmanager
def processes(model: Path, ca: Authority, keys: Path) -> Iterator[tuple[str, str]]:
    """All listen on every interface, as across hosts; the addresses of router and scheduler."""
    wanted = dict.fromkeys(PROCESSES, "0.0.0.0:0")
    ports = {name: address.rpartition(":")[2] for name, address in claim_addresses(wanted).items()}
    router, scheduler, shard = (ca.issue(name) for name in PROCESSES)
    flags = {
        "shard": [f"--model={model}", *server_flags(shard, ca)],
        "scheduler": [
            f"--shard-addresses=127.0.0.1:{ports['shard']}",
            *server_flags(scheduler, ca),
            *client_flags("shard", scheduler, ca),
        ],
        "router": [
            f"--model={model}",
            f"--scheduler-addresses=127.0.0.1:{ports['scheduler']}",
            f"--tls-cert-file={router.certificate}",
            f"--tls-key-file={router.key}",
            f"--api-keys-file={keys}",
            "--http-address=",
            *client_flags("scheduler", router, ca),
        ],
    }
    with ExitStack() as stack:
        for name, own in flags.items():
            listen = [f"--listen-address=0.0.0.0:{ports[name]}", "--metrics-address=127.0.0.1:0"]
            command = [sys.executable, "-m", name, *own, *listen, "--log-level=warning"]
            process = stack.enter_context(subprocess.Popen(command, cwd=ROOT))
            stack.callback(process.terminate)
        yield f"127.0.0.1:{ports['router']}", f"127.0.0.1:{ports['scheduler']}"


def model_of(address: str, tls: ClientTls | None, key: str | None) -> pb.GetModelResponse:
    metadata = (("authorization", f"Bearer {key}"),) if key else ()
    with rpc.channel(address, tls) as channel:
        return InferenceServiceStub(channel).GetModel(pb.GetModelRequest(), timeout=10, metadata=metadata)


def test_a_request_is_served_over_mutual_tls_for_a_key_alone(tiny_model_folder: Path, tmp_path: Path) -> None:
    ca = Authority(tmp_path)
    tls = client_tls("tls", ca.file, None, None)

    with processes(tiny_model_folder, ca, keys_file(tmp_path)) as (router, scheduler):

        def ready() -> bool:
            try:
                return bool(model_of(router, tls, KEY).max_model_len)
            except grpc.RpcError:
                return False

        until(ready, 90)

        with rpc.channel(router, tls) as channel:
            response = InferenceServiceStub(channel).Generate(
                pb.GenerateRequest(spec=spec(max_tokens=5, ignore_eos=True)),
                timeout=60,
                metadata=(("authorization", f"Bearer {KEY}"),),
            )
        assert response.usage.completion_tokens == 5
        for key in ("pgd-wrong", None):
            assert status(lambda key=key: model_of(router, tls, key))[0] is grpc.StatusCode.UNAUTHENTICATED
        assert status(lambda: model_of(router, None, KEY))[0] is grpc.StatusCode.UNAVAILABLE
        # Without a certificate, nobody speaks to a scheduler.
        assert status(lambda: model_of(scheduler, tls, KEY))[0] is grpc.StatusCode.UNAVAILABLE


def test_the_launcher_serves_with_tls_and_keys(tiny_model_folder: Path, tmp_path: Path) -> None:
    ca = Authority(tmp_path)
    pair = ca.issue("router")
    flags = [f"--tls-cert-file={pair.certificate}", f"--tls-key-file={pair.key}"]

    with launched(f"--model={tiny_model_folder}", *flags, f"--api-keys-file={keys_file(tmp_path)}") as stack:
        stack.wait_ready()
        stack.wait_line(r"^  PAGODA_CHAT_API_KEY=KEY .* --tls-ca-file CA.pem --prompt ")
        tls = client_tls("tls", ca.file, None, None)

        (tmp_path / "key.txt").write_text(KEY)
        (example,) = blocks("docs/security.md", "python")
        done = subprocess.run(
            [sys.executable, "-c", example.replace("localhost:50051", stack.address)],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.stdout == f"{tiny_model_folder.name}\n", done.stderr
        assert status(lambda: model_of(stack.address, tls, None))[0] is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize(
    ("process", "flags", "message"),
    [
        ("router", ("--model=x", "--scheduler-addresses=127.0.0.1:1"), "--listen-address 0.0.0.0:0: "),
        ("scheduler", ("--shard-addresses=127.0.0.1:1",), "--listen-address 0.0.0.0:0: "),
        ("shard", ("--model=x",), "--listen-address 0.0.0.0:0: "),
        ("router", ("--model=x", "--scheduler-addresses=example:1"), "--scheduler-addresses example:1: "),
        ("scheduler", ("--shard-addresses=example:1",), "--shard-addresses example:1: "),
        (
            "shard",
            ("--model=x", "--tls-cert-file=/no", "--tls-key-file=/x"),
            "--tls-cert-file /no: ",
        ),
        ("scheduler", ("--shard-addresses=a:1", "--shard-tls-cert-file=/x"), "--shard-tls-cert-file needs "),
        (
            "router",
            ("--model=x", "--scheduler-addresses=a:1", "--api-keys-file=/nowhere"),
            "--api-keys-file /nowhere: No such file or directory",
        ),
    ],
)
def test_what_would_be_open_or_can_not_be_read_is_one_line_and_status_2(
    process: str, flags: tuple[str, ...], message: str
) -> None:
    command = [
        sys.executable,
        "-m",
        process,
        *flags,
        "--listen-address=0.0.0.0:0",
        "--metrics-address=127.0.0.1:0",
    ]

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)

    assert done.returncode == 2
    assert done.stderr.startswith(f"python -m {process}: {message}")
    assert done.stderr.count("\n") == 1
