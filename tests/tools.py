"""Programs of others that tests run."""

import os
import shutil

import pytest


def find_tool(name: str, package: str) -> str:
    """Its path. Without Debian's package of it, the test is skipped, or fails in CI."""
    path = shutil.which(name)
    if path is None:
        (pytest.fail if "CI" in os.environ else pytest.skip)(f"needs {name}, of Debian's package {package}")
    return path
