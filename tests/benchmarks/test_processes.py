"""Contenders in processes of their own: made once, heard, and gone with who started them."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks import peers
from benchmarks.child_process import ChildProcess, reason
from benchmarks.command import BenchmarkError
from benchmarks.pagoda_server import serve_command
from benchmarks.peers import Peer, Recipe
from benchmarks.random_model import random_model
from benchmarks.workload import Answer, Run, make

PEER = """
def load(options):
    print("noise of a library")
    def run(message):
        if not message["requests"]:
            raise ValueError("nothing asked")
        times = [[0.25, 0.5] for _ in message["requests"]]
        tokens = sum(one["max_tokens"] for one in message["requests"])
        return {"seconds": 2.0, "tokens": tokens, "answers": times}
    return run
"""


@pytest.fixture
def peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Peer:
    (tmp_path / "scripted.py").write_text(PEER)
    monkeypatch.setitem(peers.PEERS, "scripted", Recipe(str(tmp_path / "scripted"), ()))
    monkeypatch.setattr(peers, "install", lambda name: Path(sys.executable))
    return Peer("scripted", tmp_path, None, "cpu", "float32")


def test_a_peer_answers_from_its_own_process(peer: Peer) -> None:
    run = peer.run(make([(4, 6), (5, 8)], 512))
    peer.close()

    assert run == Run(2.0, 14, (Answer(6, 0.25, 0.5), Answer(8, 0.25, 0.5)))


def test_a_peer_that_dies_says_why(peer: Peer) -> None:
    with pytest.raises(
        BenchmarkError, match=r"scripted ended with status 1: ValueError: nothing asked; see "
    ):
        peer.run([])
    peer.close()


BUSY_PEER = """
import os, signal, subprocess
def load(options):
    started = subprocess.Popen(["sleep", "1000"])
    os.write(2, f"{started.pid}\\n".encode())
    signal.pause()
"""


def test_a_busy_peer_ends_with_who_asked_it(tmp_path: Path) -> None:
    (tmp_path / "busy.py").write_text(BUSY_PEER)
    command = [
        sys.executable,
        "-P",
        str(Path(peers.__file__).with_name("child.py")),
        str(tmp_path / "busy"),
        "{}",
    ]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as child:
        assert child.stdin
        assert child.stderr
        grandchild = psutil.Process(int(child.stderr.readline()))

        child.stdin.close()

        assert child.wait(10) == -signal.SIGKILL
        psutil.wait_procs([grandchild], timeout=10)
        assert not grandchild.is_running() or grandchild.status() == "zombie"


def test_a_server_ends_with_who_started_it() -> None:
    command, _ = serve_command(random_model("tiny", "float32"), "")
    child = ChildProcess("pagoda", command)
    try:
        while not child.read_line().startswith("shard:"):
            pass
        processes = psutil.Process(child.process.pid).children()
        assert len(processes) == 3
        assert child.process.stdin

        child.process.stdin.close()

        assert child.process.wait(20) == 0
        assert psutil.wait_procs(processes, timeout=20)[1] == []
    finally:
        child.close()


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (
            ["python -m scheduler: too large", "12:00:00 router ERROR lost", "noise"],
            "python -m scheduler: too large",
        ),
        (["12:00:00 router ERROR lost", "noise"], "12:00:00 router ERROR lost"),
        (["Traceback", "ValueError: none", "noise"], "ValueError: none"),
        (["first", "last"], "last"),
        ([], ""),
    ],
)
def test_the_reason_is_found_among_noise(said: list[str], why: str) -> None:
    assert reason(said) == why


@pytest.fixture
def installations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands that would have run; `-m venv` makes a folder that holds a Python alone."""
    ran: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        ran.append(command)
        if "pip" in command and len(ran) == 2:
            raise KeyboardInterrupt
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(peers, "FOLDER", tmp_path)
    monkeypatch.setitem(peers.PEERS, "example", Recipe("example", ("one==1",)))
    monkeypatch.setattr("benchmarks.peers.subprocess.run", run)
    (tmp_path / "example/bin").mkdir(parents=True)
    (tmp_path / "example/bin/python").touch()
    return ran


def test_an_interrupted_installation_begins_anew(installations: list[list[str]]) -> None:
    with pytest.raises(KeyboardInterrupt):
        peers.install("example")

    peers.install("example")
    made = [command[-2:] for command in installations]
    assert made == [made[0], made[1]] * 2
    assert made[0][0] == "--clear"
    peers.install("example")
    assert len(installations) == 4, "it was complete"
