"""The own words of gRPC and torch never stand among a process's lines."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.router.models import write_model


@pytest.fixture
def needed(tmp_path: Path) -> dict[str, list[str]]:
    """What each process can't start without."""
    model = f"--model={write_model(tmp_path / 'tiny')}"
    return {
        "router": [model, "--scheduler-addresses=127.0.0.1:1", "--http-address="],
        "scheduler": ["--shard-addresses=127.0.0.1:1"],
        "shard": [model],
    }


@pytest.mark.parametrize("process", ["router", "scheduler", "shard"])
def test_an_address_that_is_taken_is_one_line(process: str, needed: dict[str, list[str]]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        flags = [f"--listen-address={address}", "--metrics-address=127.0.0.1:0", *needed[process]]
        done = subprocess.run(
            [sys.executable, "-m", process, *flags], capture_output=True, text=True, timeout=60
        )

    assert done.returncode == 2
    assert done.stderr.startswith(f"python -m {process}: --listen-address {address}: can't be bound")
    assert done.stderr.count("\n") == 1


LONELY = """
import shard.__main__
from shard import parallel
parallel.RENDEZVOUS_TIMEOUT_S = 0.1
import torch
rendezvous = parallel.Rendezvous("127.0.0.1")
group = parallel.RankGroup(parallel.Partition(0, 2), torch.device("cpu"), 1.0, "model")
try:
    group.join(rendezvous.address, 1, "")
except parallel.RankLostError:
    print("lost")
"""


def test_a_rank_that_never_comes_prints_nothing_of_torch() -> None:
    done = subprocess.run([sys.executable, "-c", LONELY], capture_output=True, text=True, timeout=60)

    assert (done.stdout, done.stderr) == ("lost\n", "")
