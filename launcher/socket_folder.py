"""Where the Unix sockets between the processes lie: a fresh folder that only this user can enter."""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from launcher.preflight import PreflightError

PREFIX = "pagoda-"
# A folder just made by another launcher may not be locked yet.
SURELY_LOCKED_AFTER_S = 60
# A Unix socket's path is at most about 100 bytes long.
LONGEST_PARENT = 60


@contextlib.contextmanager
def socket_folder() -> Iterator[Path]:
    """A new folder with mode 0700, removed at the end. Those that killed launchers left are removed first.

    Raises:
        PreflightError: no folder for temporary files can be written, such as on a full disk.
    """
    try:
        parent = Path(tempfile.gettempdir())
        if len(os.fsencode(parent)) > LONGEST_PARENT:
            parent = Path("/tmp")  # noqa: S108
        _remove_abandoned(parent)
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise PreflightError(
            f"no folder for the processes' sockets can be made: {where}{error.strerror}; TMPDIR names another"
        ) from error
    # Held until this process ends, however it ends.
    lock = _try_lock(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _remove_abandoned(parent: Path) -> None:
    for folder in parent.glob(PREFIX + "*"):
        with contextlib.suppress(OSError):
            stat = folder.lstat()
            if stat.st_uid != os.getuid() or time.time() - stat.st_mtime < SURELY_LOCKED_AFTER_S:
                continue
            lock = _try_lock(folder)
            if lock is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)


def _try_lock(folder: Path) -> int | None:
    """An open descriptor that holds the folder's lock, or None if another process has it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
