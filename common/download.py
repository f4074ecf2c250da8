"""`python -m common.download --folder FOLDER SHA256:URL…`: the files of a model, each checked.

A pod runs it before its containers. Run again, it keeps the files that are whole.
"""

import argparse
import hashlib
import http.client
import os
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from common.disk import shortage

# Of each read, and of silence.
CHUNK_BYTES: Final = 1 << 20
TIMEOUT_S: Final = 60.0


class DownloadError(Exception):
    """A file can't be had; the message says which and why."""


def parse(item: str) -> tuple[str, str, str]:
    """Checksum, URL and file name of `SHA256:URL`.

    Raises:
        DownloadError: it is none.
    """
    checksum, _, url = item.partition(":")
    parts = urlsplit(url)
    name = unquote(parts.path).rpartition("/")[2]
    if len(checksum) != 64 or parts.scheme not in ("http", "https") or name in ("", ".", ".."):
        raise DownloadError(f"{item!r} is not SHA256:URL with a file name at the URL's end")
    return checksum.lower(), url, name


def download(item: str, folder: Path) -> None:
    """Has the file of `SHA256:URL` in `folder`: never a part of it, never another.

    Raises:
        DownloadError: it can't be had, or has another checksum.
    """
    checksum, url, name = parse(item)
    target = folder / name
    if target.exists():
        with target.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() == checksum:
                print(f"{name} is there", flush=True)
                return
    print(f"{name} comes from {urlsplit(url).netloc}", flush=True)
    partial = target.with_name(name + ".partial")
    try:
        digest = _fetch(url, name, partial)
        if digest != checksum:
            raise DownloadError(f"{name}: its SHA-256 is {digest}, not {checksum}")
        os.replace(partial, target)
    except (OSError, http.client.HTTPException) as error:
        raise DownloadError(f"{target}: {error}") from error
    finally:
        partial.unlink(missing_ok=True)


def _fetch(url: str, name: str, path: Path) -> str:
    """Writes the file of that name to `path`; its SHA-256."""
    digest = hashlib.sha256()
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as source:  # noqa: S310
        size = source.length or 0
        _check_disk(path.parent, name, size)
        try:
            with path.open("wb") as file:
                while chunk := source.read(CHUNK_BYTES):
                    digest.update(chunk)
                    file.write(chunk)
        except OSError:
            path.unlink(missing_ok=True)
            _check_disk(path.parent, name, size)
            raise
    return digest.hexdigest()


def _check_disk(folder: Path, name: str, size: int) -> None:
    if reason := shortage(folder, f"for {name}", size):
        raise DownloadError(reason)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 if all files are there."""
    parser = argparse.ArgumentParser(
        prog="python -m common.download", description="Downloads files into a folder, and checks each."
    )
    parser.add_argument("--folder", type=Path, required=True, help="Where they go. Required.")
    parser.add_argument("items", metavar="SHA256:URL", nargs="+", help="A file and its checksum.")
    arguments = parser.parse_args(argv)
    try:
        for item in arguments.items:
            download(item, arguments.folder)
    except DownloadError as error:
        print(f"python -m common.download: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
