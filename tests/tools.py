"""Programs of others that tests run."""

import os
import shutil
from pathlib import Path

import pytest

NODE = Path(__file__).parents[1] / "examples" / "node"


def find_tool(name: str, package: str) -> str:
    """Its path. Without Debian's package of it, the test is skipped, or fails in CI."""
    path = shutil.which(name)
    if path is None:
        (pytest.fail if "CI" in os.environ else pytest.skip)(f"needs {name}, of Debian's package {package}")
    return path


def node_example(name: str) -> tuple[str, ...]:
    """The command line of an example for Node. Without its packages the test is skipped, or fails in CI."""
    missing = shutil.which("node") is None or not (NODE / "node_modules").exists()
    if missing and "CI" not in os.environ:
        pytest.skip("needs node, and `npm ci` in examples/node")
    return ("node", str(NODE / name))
