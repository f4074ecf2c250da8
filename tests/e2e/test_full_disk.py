"""A disk that is full: said in one line at the start, and no client's business under load."""

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil
import pytest

from launcher.preflight import claim_addresses
from launcher.readiness import get
from pagoda.v1.inference_pb2_grpc import InferenceServiceStub
from tests.disks import Disk, mounted_disk
from tests.e2e.client import Answer, spec
from tests.e2e.stack import PROCESSES, ROOT, launched, until
from tests.tools import find_tool

pytestmark = pytest.mark.e2e

MIB = 1 << 20


@dataclass(frozen=True)
class Served:
    """A launcher whose temporary files are on a disk of their own, and where clients connect."""

    process: subprocess.Popen[bytes]
    address: str

    def kill_shard(self) -> None:
        """The launcher starts another one."""
        for child in psutil.Process(self.process.pid).children():
            if child.cmdline()[2:3] == ["shard"]:
                child.kill()


@contextmanager
def served(disk: Disk, log: Path, model: Path, *flags: str) -> Iterator[Served]:
    metrics = [f"{process}-metrics-address" for process in PROCESSES]
    addresses = claim_addresses(dict.fromkeys(("listen-address", "http-address", *metrics), "127.0.0.1:0"))
    options = [f"--{name}={address}" for name, address in addresses.items()]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "launcher", "serve", f"--model={model}", *options, *flags],
            cwd=ROOT,
            stdout=output,
            stderr=output,
            env={**os.environ, "TMPDIR": str(disk.folder)},
            start_new_session=True,
        )
    try:
        until(lambda: get(addresses["router-metrics-address"], "/readyz")[0] == 200, 60)
        yield Served(process, addresses["listen-address"])
    finally:
        process.terminate()
        process.wait(40)


def test_a_disk_that_gets_full_under_load_is_hidden_from_clients(tiny_model_folder: Path) -> None:
    """Log and requests' records find no room, and then a process has to be started anew."""
    flags = ("--log-level=info", "--log-requests=text")
    with (
        mounted_disk(64 * MIB) as disk,
        served(disk, disk.folder / "log", tiny_model_folder, *flags) as serving,
        grpc.insecure_channel(serving.address) as channel,
    ):
        stub = InferenceServiceStub(channel)
        request = spec(max_tokens=600, ignore_eos=True)
        undisturbed = Answer(stub, request).finish().token_ids
        answer = Answer(stub, request).read(20)

        disk.fill()
        serving.kill_shard()

        assert answer.finish().token_ids == undisturbed
        # Longer records than what is left of the log's last page.
        for _ in range(5):
            assert Answer(stub, request).finish().token_ids == undisturbed
        assert serving.process.poll() is None

        disk.make_room()
        serving.kill_shard()
        assert Answer(stub, request).finish().token_ids == undisturbed
        serving.process.terminate()
        assert serving.process.wait(40) == 0
        said = (disk.folder / "log").read_text()
        assert "shard ended (killed by SIGKILL); restart 2 of 5" in said
        assert "Stopping; running requests may finish." in said
        assert "Traceback" not in said


def test_a_prometheus_without_room_ends_nothing(tiny_model_folder: Path, tmp_path: Path) -> None:
    """And it goes on once there is room again."""
    find_tool("prometheus", "prometheus")
    prometheus = claim_addresses({"prometheus": "127.0.0.1:0"})["prometheus"]
    log = tmp_path / "log"
    with (
        mounted_disk(512 * MIB) as disk,
        served(disk, log, tiny_model_folder, f"--prometheus-address={prometheus}") as serving,
        grpc.insecure_channel(serving.address) as channel,
    ):
        stub = InferenceServiceStub(channel)
        until(lambda: watched_at(prometheus) > 0)

        disk.fill()
        until(lambda: "no space left on device" in log.read_text())
        assert len(Answer(stub, spec(max_tokens=100, ignore_eos=True)).finish().token_ids) == 100

        before = watched_at(prometheus)
        disk.make_room()
        until(lambda: watched_at(prometheus) > before)
        assert " ended (" not in log.read_text()


def watched_at(prometheus: str) -> float:
    """When Prometheus last heard of a process; 0 if it never did."""
    url = f"http://{prometheus}/api/v1/query?query=max(timestamp(up))"
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            found = json.load(response)["data"]["result"]
    except OSError:
        return 0.0
    return float(found[0]["value"][1]) if found else 0.0


def test_a_disk_too_full_for_the_model_is_named_and_served_from_once_it_has_room() -> None:
    with mounted_disk(512 * MIB) as disk:
        disk.fill()
        with launched(XDG_CACHE_HOME=str(disk.folder)) as stack:
            stack.wait_line(rf"^{disk.folder}/pagoda: too little room .*: \d+ bytes needed, \d+ free")
            assert stack.process.wait(30) == 2
            assert "Traceback" not in "\n".join(stack.lines)

        disk.make_room()

        with launched(XDG_CACHE_HOME=str(disk.folder)) as stack:
            stack.wait_ready()
            with stack.channel() as channel:
                assert Answer(stack.stub(channel), spec(max_tokens=5)).finish().token_ids
