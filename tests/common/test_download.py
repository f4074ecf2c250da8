"""Files come whole or not at all."""

import hashlib
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from common.download import DownloadError, download, main, parse
from tests.disks import mounted_disk

CONTENT = b'{"model_type": "llama"}'
CHECKSUM = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """Of a server that has `config.json`."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_bytes(CONTENT)
    handler = partial(SimpleHTTPRequestHandler, directory=str(source))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    return tmp_path / "model"


def test_a_file_comes_under_the_name_in_its_url(url: str, folder: Path) -> None:
    assert main([f"--folder={folder}", f"{CHECKSUM}:{url}/config.json?version=1"]) == 0

    assert (folder / "config.json").read_bytes() == CONTENT


def test_a_whole_file_is_kept(folder: Path) -> None:
    (folder / "config.json").write_bytes(CONTENT)

    download(f"{CHECKSUM}:http://127.0.0.1:1/config.json", folder)


def test_a_broken_file_is_replaced(url: str, folder: Path) -> None:
    (folder / "config.json").write_bytes(CONTENT[:5])

    download(f"{CHECKSUM}:{url}/config.json", folder)

    assert (folder / "config.json").read_bytes() == CONTENT


def test_another_file_is_refused_and_leaves_nothing(url: str, folder: Path) -> None:
    with pytest.raises(DownloadError, match=f"config.json: its SHA-256 is {CHECKSUM}, not {'0' * 64}"):
        download(f"{'0' * 64}:{url}/config.json", folder)

    assert list(folder.iterdir()) == []


def test_a_file_that_can_not_be_had_is_named(
    url: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([f"--folder={folder}", f"{CHECKSUM}:{url}/none.json"]) == 1

    assert "none.json: HTTP Error 404" in capsys.readouterr().err


class OfUnknownSize(SimpleHTTPRequestHandler):
    def send_header(self, keyword: str, value: str) -> None:
        if keyword != "Content-Length":
            super().send_header(keyword, value)


@pytest.mark.parametrize(
    ("handler", "reason"),
    [
        (SimpleHTTPRequestHandler, "too little room for big.bin: 100000 bytes needed, 65536 free"),
        (OfUnknownSize, "big.bin: [Errno 28] No space left on device"),
    ],
)
def test_a_full_disk_is_named_and_left_as_it_was(
    handler: type[SimpleHTTPRequestHandler], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = b"x" * 100_000
    (tmp_path / "big.bin").write_bytes(content)
    with (
        mounted_disk(1 << 16) as disk,
        ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(tmp_path))) as server,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        item = f"{hashlib.sha256(content).hexdigest()}:http://127.0.0.1:{server.server_port}/big.bin"
        status = main([f"--folder={disk.folder}", item])
        server.shutdown()

        assert status == 1
        # Between what the server logs, of a client that left, too.
        (line,) = [one for one in capsys.readouterr().err.splitlines() if str(disk.folder) in one]
        assert reason in line
        assert list(disk.folder.iterdir()) == []


@pytest.mark.parametrize(
    "item", ["abc:http://host/file", f"{CHECKSUM}:http://host/", f"{CHECKSUM}:file:///x"]
)
def test_what_names_no_file_is_refused(item: str) -> None:
    with pytest.raises(DownloadError, match="is not SHA256:URL"):
        parse(item)
