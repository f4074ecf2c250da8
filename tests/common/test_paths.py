"""Where things lie on a user's machine."""

from pathlib import Path

import pytest

from common.paths import cache_root


def test_the_cache_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root() == tmp_path / "pagoda"

    for ignored in ("", "cache", "./cache"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert cache_root() == Path.home() / ".cache" / "pagoda"
