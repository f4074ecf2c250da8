"""Files that are read anew when they change, such as certificates and keys that somebody rotates."""

import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Generic, TypeVar

from common import metrics
from common.config import ConfigError

# Certificates, keys and lists of keys are far smaller.
MAX_FILE_BYTES: Final = 1024 * 1024

T = TypeVar("T")

_log = logging.getLogger(__name__)


def read_file(option: str, path: Path) -> bytes:
    """The content of a file that `option` named.

    Raises:
        ConfigError: it can't be read, is empty or too large; the message names the option.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{option} {path}: {error.strerror}") from error
    if not content:
        raise ConfigError(f"{option} {path}: is empty")
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{option} {path}: more than {MAX_FILE_BYTES} bytes")
    return content


class Reloading(Generic[T]):
    """What `read` makes of files, made anew when they have changed. Thread-safe.

    Attributes:
        problem: Why what was read before is still in use, although the files have changed; empty if it isn't.
    """

    def __init__(self, name: str, paths: Sequence[Path], read: Callable[[], T]) -> None:
        """`read` raises ConfigError on what it can't use, and so does this. Metrics know them by `name`."""
        self.problem = ""
        self._paths = paths
        self._read = read
        self._lock = threading.Lock()
        # Before reading: a change during it is another stamp the next time.
        self._stamp = self._stamps()
        self._value = read()
        self._name = name
        metrics.STALE.labels(name).set(0)
        for result in ("ok", "failed"):
            metrics.RELOADS.labels(name, result)

    def current(self) -> T:
        """As the files are, or as they last were in order; each problem is logged once."""
        with self._lock:
            stamp = self._stamps()
            if stamp != self._stamp:
                self._stamp = stamp
                self._reload()
                metrics.RELOADS.labels(self._name, "failed" if self.problem else "ok").inc()
                metrics.STALE.labels(self._name).set(bool(self.problem))
            return self._value

    def _reload(self) -> None:
        try:
            self._value = self._read()
        except ConfigError as error:
            if str(error) != self.problem:
                _log.error("%s; what was read before stays in use", error)
            self.problem = str(error)
            if isinstance(error.__cause__, OSError):
                # It may pass without a change of the files, as too many open ones do.
                self._stamp = []
        else:
            self.problem = ""
            _log.info("read anew: %s", ", ".join(map(str, self._paths)))

    def _stamps(self) -> list[tuple[int, ...]]:
        return [_stamp(path) for path in self._paths]


def _stamp(path: Path) -> tuple[int, ...]:
    """Another one whenever the file or the link to it is another, or was written."""
    try:
        status = os.stat(path)
    except OSError:
        return ()
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size
