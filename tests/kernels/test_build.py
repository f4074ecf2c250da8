"""What compiles the CPU kernels leaves whole libraries or none, and a damaged one is never run."""

import logging
import os
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kernels.cpu import build, library
from tests.disks import mounted_disk

BEST = library.best_set()
Capture = pytest.CaptureFixture[str]

pytestmark = pytest.mark.skipif(BEST is None, reason="no compiled kernels for this CPU")


@pytest.fixture
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty `build/kernels`, for one instruction set that this CPU can run."""
    assert BEST
    built = build.library_path(BEST)
    known = {machine: {BEST: sets[BEST]} for machine, sets in build.INSTRUCTION_SETS.items() if BEST in sets}
    monkeypatch.setattr(build, "INSTRUCTION_SETS", known)
    monkeypatch.setattr(build, "ROOT", tmp_path)
    monkeypatch.setattr(build, "OUTPUT", tmp_path / "kernels")
    monkeypatch.setattr(sys, "argv", ["build.py"])
    monkeypatch.setenv("PYTHONPATH", str(build.SOURCES.parent.parent))
    monkeypatch.setenv("BUILT", str(built))
    library.load_set.cache_clear()
    yield build.OUTPUT
    library.load_set.cache_clear()


def compiler(folder: Path, script: str) -> str:
    """A program that runs `script`, in which `$out` is what it is to make."""
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\nfor out; do :; done\n{script}\n")
    path.chmod(0o755)
    return str(path)


def library_of(output: Path) -> Path:
    assert BEST
    return output / build.library_path(BEST).name


def test_what_was_built_is_tried_sealed_and_not_built_again(
    output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("CXX", compiler(tmp_path, 'cp "$BUILT" "$out"'))
    assert build.main() == 0
    assert list(output.iterdir()) == [library_of(output)]
    assert build.is_intact(library_of(output))
    monkeypatch.setenv("CXX", "no-such-compiler")

    assert build.main() == 0
    assert capsys.readouterr().out == "Compiling the CPU kernels\nThe CPU kernels are there, in kernels\n"


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("exit 1", ""),
        ('echo "int" > "$out"', "what was built can't be loaded"),
        # A library, but another one.
        (f'cp "{sys.modules["_ctypes"].__file__}" "$out"', "what was built can't be loaded"),
    ],
)
def test_a_failed_build_is_a_failure_and_leaves_nothing(
    script: str,
    reason: str,
    output: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("CXX", compiler(tmp_path, script))

    assert build.main() == 1
    printed = capfd.readouterr()
    assert f"can't compile the CPU kernels for {BEST}" in printed.out
    assert reason in printed.err
    assert "Traceback" not in printed.err
    assert list(output.iterdir()) == []


def test_a_compiler_that_is_not_there_is_named(
    output: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -O9")

    assert build.main() == 1
    assert capsys.readouterr().out.startswith("No no-such-compiler -O9, so the CPU kernels are not built")
    assert not output.exists()


def test_a_folder_that_can_not_be_written_gives_one_line(
    output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("CXX", compiler(tmp_path, "exit 1"))
    output.touch()

    assert build.main() == 1
    assert capsys.readouterr().err.startswith(f"The CPU kernels can't be built in {output}: ")


@pytest.mark.parametrize(
    ("size", "script", "reason"),
    [
        (
            1 << 20,
            'cp "$BUILT" "$out"',
            "too little room for the CPU kernels: 16777216 bytes needed, 1048576",
        ),
        (1 << 25, 'cat /dev/zero > "$out"', "can't compile the CPU kernels"),
    ],
)
def test_a_full_disk_is_named_and_left_as_it_was(
    size: int,
    script: str,
    reason: str,
    output: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("CXX", compiler(tmp_path, script))
    with mounted_disk(size) as disk:
        monkeypatch.setattr(build, "OUTPUT", disk.folder)

        assert build.main() == 1
        printed = capfd.readouterr()
        assert reason in printed.out
        assert "Traceback" not in printed.err
        assert list(disk.folder.iterdir()) == []


@pytest.mark.parametrize(("flag", "status"), [("--help", 0), ("--bogus", 2)])
def test_a_flag_builds_nothing(
    flag: str, status: int, output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler(tmp_path, 'cp "$BUILT" "$out"'))
    monkeypatch.setattr(sys, "argv", ["build.py", flag])

    with pytest.raises(SystemExit) as ended:
        build.main()

    assert ended.value.code == status
    assert not output.exists()


def test_two_builds_at_once_do_not_meet(output: Path, tmp_path: Path) -> None:
    assert BEST
    # Each waits until the other one compiles too.
    wait = 'echo > "$out.begun"; until [ "$(find "$KERNELS" -name "*.begun" | wc -l)" -ge 2 ]; do :; done'
    command = ["env", f"KERNELS={output}", compiler(tmp_path, f'{wait}; cp "$BUILT" "$out"')]

    with ThreadPoolExecutor() as threads:
        builds = [threads.submit(build.compile_sets, command, [BEST]) for _ in range(2)]

    assert [one.result() for one in builds] == [[], []]
    assert build.is_intact(library_of(output))
    assert list(output.iterdir()) == [library_of(output)]


@pytest.mark.parametrize("harm", ["truncated", "emptied", "another library"])
def test_a_damaged_library_is_named_and_not_run(
    harm: str, output: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert BEST
    content = Path(os.environ["BUILT"]).read_bytes()
    output.mkdir()
    damaged = library_of(output)
    damaged.write_bytes(content)
    assert build.broken_sets() == []
    if harm == "another library":
        shutil.copy(str(sys.modules["_ctypes"].__file__), damaged)
    else:
        damaged.write_bytes(content[: len(content) // 2 if harm == "truncated" else 0])

    assert library.load_set(BEST) is None
    assert library.load_set(BEST) is None
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert f"{damaged} can't be used" in record.message
    assert "`make kernels`" in record.message
    assert build.broken_sets() == [BEST]


def test_a_library_that_was_never_built_is_no_news(output: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert BEST
    assert library.load_set(BEST) is None
    assert not caplog.records
