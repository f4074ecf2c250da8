"""Where things lie on a user's machine."""

import os
from pathlib import Path


def cache_root() -> Path:
    """Where converted models are kept: `$XDG_CACHE_HOME/pagoda`, or `~/.cache/pagoda`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagoda"
