"""Where things lie on a user's machine."""

import os
from pathlib import Path


def cache_root() -> Path:
    """Where converted models are kept: `$XDG_CACHE_HOME/pagoda`, or `~/.cache/pagoda`.

    A relative path is ignored, as the XDG Base Directory Specification wants it: it would mean another folder
    to each process.
    """
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (given if given.is_absolute() else Path.home() / ".cache") / "pagoda"
