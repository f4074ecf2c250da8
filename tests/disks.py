"""Disks that get full."""

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class Disk:
    """A file system of its own, in memory; it takes only the memory of what is written."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder = folder
        self._size = size

    def fill(self) -> None:
        """From now on, no write finds room."""
        # Another one may come in between.
        while not self._remount(shutil.disk_usage(self.folder).used):
            pass

    def make_room(self) -> None:
        """It has its whole size again."""
        assert self._remount(self._size)

    def _remount(self, size: int) -> bool:
        # A size of 0 would be none at all.
        return not _mount(self.folder, f"remount,size={max(size, 4096)}").returncode


@contextmanager
def mounted_disk(size: int) -> Iterator[Disk]:
    """A disk of `size` bytes, at a path short enough for sockets. Who may not mount one skips the test."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        if (mounted := _mount(folder, f"size={size}")).returncode:
            pytest.skip(f"can't mount a disk here: {mounted.stderr.strip()}")
        try:
            yield Disk(folder, size)
        finally:
            # What had files open there may be just ending.
            subprocess.run(["umount", "--lazy", folder], check=True)


def _mount(folder: Path, options: str) -> subprocess.CompletedProcess[str]:
    command = ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)]
    return subprocess.run(command, capture_output=True, text=True)
