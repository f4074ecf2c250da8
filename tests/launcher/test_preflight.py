"""What is wrong before anything starts is said in one line that names it."""

import importlib.metadata
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher import preflight
from launcher.preflight import ROOT, PreflightError


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def launch(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "launcher", *arguments], cwd=ROOT, capture_output=True, text=True
    )


def assert_refused(result: subprocess.CompletedProcess[str], *words: str) -> None:
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    for word in words:
        assert word in result.stderr


def test_a_port_in_use_is_named(taken_port: int) -> None:
    addresses = {"listen-address": "127.0.0.1:0", "shard-metrics-address": f"127.0.0.1:{taken_port}"}

    with pytest.raises(
        PreflightError, match=f"--shard-metrics-address 127.0.0.1:{taken_port}: the port is in use"
    ):
        preflight.claim_addresses(addresses)


def test_two_options_can_not_share_a_port() -> None:
    free = preflight.claim_addresses({"a": "127.0.0.1:0"})["a"]

    with pytest.raises(PreflightError, match=r"--b .* in use"):
        preflight.claim_addresses({"a": free, "b": free})


def test_port_0_becomes_a_free_port_for_each() -> None:
    claimed = preflight.claim_addresses({"a": "127.0.0.1:0", "b": "127.0.0.1:0"})

    assert len({*claimed.values(), "127.0.0.1:0"}) == 3


def test_an_address_without_a_port_is_refused() -> None:
    with pytest.raises(PreflightError, match="--a: 'localhost' is not HOST:PORT"):
        preflight.claim_addresses({"a": "localhost"})


def test_an_unknown_model_is_refused_before_any_process_starts(tmp_path: Path) -> None:
    assert_refused(launch("serve", "--model", str(tmp_path / "none")), "--model", "no such file or folder")


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match=r"no config\.json in it"):
        preflight.check_model(tmp_path)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()

    with pytest.raises(PreflightError, match=r"neither a folder nor a \.gguf file"):
        preflight.check_model(tmp_path / "model.bin")


def test_a_bad_flag_is_refused() -> None:
    assert_refused(launch("serve", "--max-num-seqs", "0"), "--max-num-seqs", "at least 1")


def test_an_unknown_command_is_refused() -> None:
    assert_refused(launch("fly"), "'fly' is no command")


def test_missing_stubs_name_the_target_that_makes_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(preflight, "ROOT", tmp_path)

    with pytest.raises(PreflightError, match="make protos"):
        preflight.check_installation("chat")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "CHAT_MODULES", ("grpc", "not_installed.anywhere"))

    with pytest.raises(PreflightError, match=r"lacks not_installed\.anywhere: run `make chat`"):
        preflight.check_installation("chat")


def test_hugging_faces_kernels_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.10.0")

    with pytest.raises(PreflightError, match="pip uninstall kernels"):
        preflight.check_installation("serve")
