"""Follows a Dockerfile's instructions in folders of this machine, in the place of an image builder."""

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Runs one shell command of a stage in its folder.
Run = Callable[[str, Path], None]


def instructions(file: Path) -> Iterator[tuple[str, str]]:
    """Each instruction and its words, with continued lines joined."""
    text = re.sub(r"^#.*\n", "", file.read_text(), flags=re.MULTILINE)
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        if line.strip():
            name, _, words = line.partition(" ")
            yield name, words


def build(file: Path, folder: Path, arguments: Mapping[str, str], run: Run) -> Path:
    """The `WORKDIR` of the last stage, whose name is what the last FROM says.

    `arguments` are for `ARG`s. Stages that it doesn't take anything from are built all the same, except those
    that are for the list of what is in an image.
    """
    values: dict[str, str] = {}
    stage, skipped = folder, False
    for name, words in instructions(file):
        if name == "ARG":
            key, _, default = words.partition("=")
            values[key] = arguments.get(key, default)
        elif name == "FROM":
            _, _, alias = words.partition(" AS ")
            skipped = alias in ("list", "sbom")
            stage = folder / (alias or "final")
            if not skipped:
                stage.mkdir()
        elif name == "COPY" and not skipped:
            _copy(shlex.split(words), folder, stage)
        elif name == "RUN" and not skipped:
            run(words, stage)
    return stage


def _copy(words: list[str], folder: Path, stage: Path) -> None:
    source = ROOT
    if words[0].startswith("--from="):
        source = folder / words.pop(0).removeprefix("--from=")
        words = [word.removeprefix("/pagoda/") for word in words]
    *names, target = words
    for name in names:
        assert source != ROOT or name.partition("/")[0] in context(), f"{name} isn't in .dockerignore"
        if (source / name).is_dir():
            shutil.copytree(
                source / name, stage / target, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
            )
        else:
            into = stage / target / Path(name).name if target.endswith("/") else stage / target
            into.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / name, into)


def context() -> set[str]:
    """What .dockerignore leaves for a builder to see."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    return {line.removeprefix("!") for line in lines if line.startswith("!")}


def shell(command: str, folder: Path) -> None:
    """Runs a command as a builder does, but for packages of the system."""
    if "apt-get" in command:
        return
    subprocess.run(
        ["bash", "-ec", command],
        cwd=folder,
        check=True,
        env={**{name: os.environ[name] for name in ("PATH", "HOME")}, **_pip_settings()},
    )


def _pip_settings() -> dict[str, str]:
    """Where packages come from on this machine."""
    return {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "UV_"))}
