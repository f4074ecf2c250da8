"""Makes the virtual environment and installs what pyproject.toml lists.

`python3 -m launcher.environment .venv [--no-deps] EXTRA…`, called by the Makefile with the system's Python,
so nothing above the version check may need a new one. pip is handed the requirements, not this project: that
would need a build and leave its litter in the tree.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

GIB = 1024**3


def main(folder: str, *arguments: str) -> None:
    """Installs the base dependencies and the extras named into the environment at `folder`."""
    if sys.version_info < (3, 11):  # noqa: UP036
        sys.exit(
            f"{sys.executable} is Python {sys.version.split()[0]}; Pagoda needs 3.11 or newer. "
            "Name another: make PYTHON=/path/to/python3"
        )
    extras = [argument for argument in arguments if argument != "--no-deps"]
    dependencies = "--no-deps" not in arguments
    venv = Path(folder)
    if not (venv / "bin/pip").exists():
        create(venv)
    requirements = read_requirements(Path("pyproject.toml"), extras, base=dependencies)
    if "shard" in extras:
        check_disk(venv)
    print(f"Installing into {venv}: {', '.join(extras)}", flush=True)
    pip(venv, "install", *(() if dependencies else ("--no-deps",)), *requirements)


def create(venv: Path) -> None:
    """Creates an empty virtual environment with pip in it."""
    if importlib.util.find_spec("ensurepip") is None or importlib.util.find_spec("venv") is None:
        sys.exit(
            f"{sys.executable} has no venv or ensurepip module, which Debian and Ubuntu package apart: "
            f"apt-get install python{sys.version_info.major}.{sys.version_info.minor}-venv"
        )
    check_free(venv, GIB // 4)
    if subprocess.run([sys.executable, "-m", "venv", str(venv)]).returncode:
        sys.exit(f"{sys.executable} could not make {venv}; its reason is above")


def read_requirements(pyproject: Path, extras: list[str], base: bool = True) -> list[str]:
    """The requirements of `extras` and, with `base`, those that every process has."""
    import tomllib

    project = tomllib.loads(pyproject.read_text())["project"]
    lists = [project["dependencies"]] if base else []
    lists += [project["optional-dependencies"][extra] for extra in extras]
    return sorted({requirement for one in lists for requirement in one})


def check_disk(venv: Path) -> None:
    """Checks that torch fits, which dwarfs the rest; its CUDA build is several times its CPU build."""
    if next(venv.glob("lib/python*/site-packages/torch"), None):
        return
    report = pip(venv, "install", "--dry-run", "--quiet", "--report", "-", "torch", capture=True)
    names = [item["metadata"]["name"].lower() for item in json.loads(report)["install"]]
    cuda = any(name.startswith(("nvidia", "cuda")) for name in names)
    check_free(venv, 10 * GIB if cuda else 2 * GIB)


def check_free(venv: Path, needed: int) -> None:
    """Ends the program when the disk under `venv` has less than `needed` bytes free."""
    free = shutil.disk_usage(venv.resolve().parent).free
    if free < needed:
        sys.exit(f"The disk under {venv.resolve().parent} is too small: {needed} bytes needed, {free} free")


def pip(venv: Path, command: str, *arguments: str, capture: bool = False) -> str:
    """Runs pip with the tested versions as constraints; its own words explain a failure."""
    result = subprocess.run(
        [str(venv / "bin/python"), "-m", "pip", command, "--constraint", "constraints.txt", *arguments],
        stdout=subprocess.PIPE if capture else None,
        env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"},
        text=True,
    )
    if result.returncode:
        sys.exit("pip could not install the dependencies; its reason is above")
    return result.stdout or ""


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit("Stopped; the same command goes on where this one was.")
