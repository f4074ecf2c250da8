"""Files that change, for better and for worse, while somebody uses them."""

import logging
from pathlib import Path

import pytest

from common.config import ConfigError
from common.reload import Reloading, read_file
from tests.authority import replace
from tests.samples import growth, sample


class Reader:
    """Reads a file, and counts how often; fails while it is told to."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.reads = 0
        self.failure: Exception | None = None

    def __call__(self) -> bytes:
        self.reads += 1
        content = read_file("--file", self.file)
        if self.failure:
            raise ConfigError(f"--file {self.file}: can't be used") from self.failure
        return content


@pytest.fixture
def reader(tmp_path: Path) -> Reader:
    file = tmp_path / "file"
    file.write_bytes(b"old")
    return Reader(file)


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno == logging.ERROR]


def test_a_file_is_read_once_for_each_change(reader: Reader) -> None:
    file = Reloading("files", [reader.file], reader)

    assert [file.current() for _ in range(3)] == [b"old"] * 3
    replace(reader.file, b"new")
    assert [file.current() for _ in range(3)] == [b"new"] * 3
    assert reader.reads == 2


def test_a_link_that_is_turned_is_a_change(reader: Reader, tmp_path: Path) -> None:
    """As mounted secrets are renewed."""
    (tmp_path / "1").mkdir()
    (tmp_path / "2").mkdir()
    (tmp_path / "1/file").write_bytes(b"first")
    (tmp_path / "2/file").write_bytes(b"second")
    (tmp_path / "data").symlink_to("1")
    reader.file = tmp_path / "data/file"
    file = Reloading("files", [reader.file], reader)

    (tmp_path / "next").symlink_to("2")
    (tmp_path / "next").replace(tmp_path / "data")

    assert file.current() == b"second"


def test_what_is_broken_is_read_again_only_after_a_change(
    reader: Reader, caplog: pytest.LogCaptureFixture
) -> None:
    file = Reloading("files", [reader.file], reader)
    reader.failure = ValueError()
    replace(reader.file, b"broken")

    assert [file.current() for _ in range(3)] == [b"old"] * 3
    assert reader.reads == 2
    assert errors(caplog) == [f"--file {reader.file}: can't be used; what was read before stays in use"]
    assert file.problem == f"--file {reader.file}: can't be used"

    reader.failure = None
    replace(reader.file, b"new")
    assert (file.current(), file.problem) == (b"new", "")


def test_metrics_say_whether_a_change_could_be_read(reader: Reader) -> None:
    def figures() -> list[float]:
        return [sample("pagoda_stale_files", files="counted"), ok(), failed()]

    ok, failed = (growth("pagoda_reloads_total", files="counted", result=r) for r in ("ok", "failed"))
    file = Reloading("counted", [reader.file], reader)
    reader.failure = ValueError()
    replace(reader.file, b"broken")
    file.current()
    assert figures() == [1, 0, 1]

    reader.failure = None
    replace(reader.file, b"new")
    file.current()

    assert figures() == [0, 1, 1]


def test_what_the_system_could_not_do_is_tried_again(
    reader: Reader, caplog: pytest.LogCaptureFixture
) -> None:
    file = Reloading("files", [reader.file], reader)
    reader.failure = OSError("too many open files")
    replace(reader.file, b"new")

    assert [file.current() for _ in range(3)] == [b"old"] * 3
    assert len(errors(caplog)) == 1
    reader.failure = None
    assert file.current() == b"new"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file or directory"),
        (b"", "is empty"),
        (b"x" * (1 << 20 | 1), "more than 1048576 bytes"),
    ],
    ids=["missing", "empty", "too large"],
)
def test_a_file_that_can_not_be_used_is_named(tmp_path: Path, content: bytes | None, message: str) -> None:
    file = tmp_path / "file"
    if content is not None:
        file.write_bytes(content)

    with pytest.raises(ConfigError, match=f"--file {file}: {message}"):
        read_file("--file", file)
