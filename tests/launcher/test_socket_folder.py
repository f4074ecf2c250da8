"""Sockets lie where only this user can enter, and nothing stays behind for long."""

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from launcher.preflight import ROOT, PreflightError
from launcher.socket_folder import socket_folder

KILLED = """
import os, signal
from pathlib import Path
from launcher.socket_folder import socket_folder
with socket_folder() as folder:
    print(folder, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def temporary_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("t")))


def make_old(folder: Path) -> None:
    os.utime(folder, (0, 0))


def test_only_this_user_can_enter_and_it_is_removed() -> None:
    with socket_folder() as folder:
        (folder / "shard-0").touch()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700

    assert not folder.exists()


def test_a_killed_launchers_folder_is_removed_by_the_next() -> None:
    environ = {**os.environ, "TMPDIR": tempfile.gettempdir()}
    result = subprocess.run(
        [sys.executable, "-c", KILLED], cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True
    )
    left = Path(result.stdout.strip())
    assert left.exists()
    make_old(left)

    with socket_folder():
        assert not left.exists()


def test_a_running_launchers_folder_stays() -> None:
    with socket_folder() as first:
        make_old(first)
        with socket_folder():
            assert first.exists()


def test_a_path_too_long_for_sockets_is_avoided(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 100)))

    with socket_folder() as folder:
        assert len(str(folder)) < 60


def test_no_folder_for_temporary_files_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/proc")

    with (
        pytest.raises(PreflightError, match=r"sockets can be made: /proc/pagoda-\w+: .*TMPDIR names another"),
        socket_folder(),
    ):
        pass
