"""The examples run as their first lines say, against real processes."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Protocol

import pytest

ROOT = Path(__file__).parents[2]
NODE = ROOT / "examples" / "node"
PROMPT = "Say hello."

pytestmark = pytest.mark.e2e


class Stack(Protocol):
    """Router, scheduler and shard, all running."""

    address: str


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def example(name: str) -> tuple[str, ...]:
    """The command line that an example's first lines give, without its arguments."""
    if name == "node":
        missing = shutil.which("node") is None or not (NODE / "node_modules").exists()
        if missing and "CI" not in os.environ:
            pytest.skip("needs node, and `npm ci` in examples/node")
        return ("node", str(NODE / "stream.mjs"))
    if name == "reflection":
        return (sys.executable, "examples/python/reflection.py")
    return (sys.executable, "-m", f"examples.python.{name}")


NAMES = ["generate", "stream_asyncio", "reflection", "node"]


@pytest.mark.parametrize("name", NAMES)
def test_an_example_prints_an_answer_and_its_usage(stack: Stack, name: str) -> None:
    result = run(*example(name), stack.address, PROMPT)

    assert result.returncode == 0, result.stderr
    *text, usage = result.stdout.strip().splitlines()
    assert any(line.strip() for line in text)
    assert usage.endswith("completion tokens")


@pytest.mark.parametrize("name", NAMES)
def test_an_example_without_a_server_says_so_in_one_line(name: str) -> None:
    result = run(*example(name), "127.0.0.1:1", PROMPT)

    assert result.returncode == 1
    assert result.stderr.startswith("UNAVAILABLE: ")
    assert result.stderr.count("\n") == 1


def test_several_prompts_are_answered_at_once(stack: Stack) -> None:
    result = run(*example("stream_asyncio"), stack.address, "Say one.", "Say two.")

    assert result.stdout.count("completion tokens") == 2
