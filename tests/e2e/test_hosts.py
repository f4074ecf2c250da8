"""Two ranks of one model on two hosts: network namespaces that nothing but a virtual cable joins.

Each has loopback of its own, so a rank that told the other to meet it there would wait for ever.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import grpc
import psutil
import pytest

from launcher.preflight import claim_addresses
from pagoda.v1 import inference_pb2 as pb
from pagoda.v1.inference_pb2_grpc import InferenceServiceStub
from tests.authority import Authority
from tests.e2e.client import Answer, spec
from tests.e2e.stack import ROOT, until
from tests.e2e.test_security import client_flags, server_flags

pytestmark = pytest.mark.e2e

NAMESPACE, HERE, THERE = "pagoda-test", "10.213.77.1", "10.213.77.2"
LENGTH = 400


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def cable() -> Iterator[None]:
    """A namespace at `THERE`, joined to this one at `HERE`."""
    if shutil.which("ip") is None:
        assert not os.environ.get("CI"), "ip is missing, and this test needs it: install iproute2"
        pytest.skip("needs ip")
    try:
        ip("netns", "add", NAMESPACE)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"can't make a network namespace here: {error.stderr.strip()}")
    try:
        ip("link", "add", "pagoda-here", "type", "veth", "peer", "name", "pagoda-there", "netns", NAMESPACE)
        ip("addr", "add", f"{HERE}/24", "dev", "pagoda-here")
        ip("link", "set", "pagoda-here", "up")
        for words in (
            ("addr", "add", f"{THERE}/24", "dev", "pagoda-there"),
            ("link", "set", "pagoda-there", "up"),
            ("link", "set", "lo", "up"),
        ):
            ip("-n", NAMESPACE, *words)
        yield
    finally:
        # The cable goes with its other end.
        ip("netns", "delete", NAMESPACE)


def start(stack: ExitStack, name: str, *flags: str, within: Sequence[str] = ()) -> "subprocess.Popen[bytes]":
    command = [*within, sys.executable, "-m", name, *flags, "--metrics-address=127.0.0.1:0"]
    process = stack.enter_context(
        subprocess.Popen(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})
    )
    stack.callback(process.kill)
    return process


def test_ranks_on_two_hosts_lose_no_token_when_one_is_killed(
    cable: None, tiny_model_folder: Path, tmp_path: Path
) -> None:
    ca = Authority(tmp_path)
    pairs = {name: ca.issue(name) for name in ("shard", "scheduler")}
    ports = {
        name: address.rpartition(":")[2]
        for name, address in claim_addresses(
            dict.fromkeys(("listen", "shard"), "127.0.0.1:0") | {"far": f"{HERE}:0"}
        ).items()
    }
    far = f"{THERE}:{ports['far']}"
    rank = [f"--model={tiny_model_folder}", "--dtype=float32", "--tensor-parallel-size=2"]
    rank += [*server_flags(pairs["shard"], ca), "--collective-timeout=10"]
    near = [*rank, "--rank=0", f"--rendezvous-host={HERE}", f"--listen-address=127.0.0.1:{ports['shard']}"]
    other = [*rank, "--rank=1", f"--rendezvous-host={THERE}", f"--listen-address={far}"]
    inside = ("ip", "netns", "exec", NAMESPACE)
    with ExitStack() as stack:
        start(stack, "shard", *near)
        victim = start(stack, "shard", *other, within=inside)
        start(
            stack,
            "scheduler",
            f"--shard-addresses=127.0.0.1:{ports['shard']},{far}",
            f"--listen-address=unix:{tmp_path}/scheduler",
            *client_flags("shard", pairs["scheduler"], ca),
        )
        start(
            stack,
            "router",
            f"--model={tiny_model_folder}",
            f"--scheduler-addresses=unix:{tmp_path}/scheduler",
            f"--listen-address=127.0.0.1:{ports['listen']}",
            "--http-address=",
        )
        with grpc.insecure_channel(f"127.0.0.1:{ports['listen']}") as channel:
            stub = InferenceServiceStub(channel)
            request = spec(max_tokens=LENGTH, temperature=1, seed=4, ignore_eos=True)
            until(lambda: ready(stub), 60)
            undisturbed = Answer(stub, request).finish()
            answer = Answer(stub, request).read(20)

            for process in psutil.Process(victim.pid).children(recursive=True):
                process.kill()
            victim.kill()
            start(stack, "shard", *other, within=inside)

            assert answer.finish().token_ids == undisturbed.token_ids


def ready(stub: InferenceServiceStub) -> bool:
    try:
        return bool(stub.GetModel(pb.GetModelRequest(), timeout=5).max_model_len)
    except grpc.RpcError:
        return False
