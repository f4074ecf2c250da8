"""Real processes: the launcher and its three children, as `make serve` starts them."""

import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import psutil

from pagoda.v1.inference_pb2_grpc import InferenceServiceStub

ROOT = Path(__file__).parents[2]
PROCESSES = ("router", "scheduler", "shard")


class Stack:
    """A running launcher. Its output is read to the end, so that it never blocks."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self.address = ""
        # Of the OpenAI-compatible API.
        self.url = ""
        self.metrics: dict[str, str] = {}
        self._queue: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self._queue.put(line.rstrip())
        self._queue.put(None)

    def wait_line(self, pattern: str, timeout_s: float = 60) -> re.Match[str]:
        """The next line of output that matches."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                line = self._queue.get(timeout=max(deadline - time.monotonic(), 0))
            except queue.Empty:
                raise TimeoutError(f"no {pattern!r} in {timeout_s} s; got {self.lines}") from None
            if line is None:
                raise EOFError(f"no {pattern!r} before the end; got {self.lines}")
            self.lines.append(line)
            if found := re.search(pattern, line):
                return found

    def wait_ready(self, timeout_s: float = 120) -> None:
        """Until the addresses are printed."""
        self.address = self.wait_line(r"gRPC +(\S+)", timeout_s)[1]
        self.url = self.wait_line(r"HTTP +(\S+)")[1]
        while found := self.wait_line(r"metrics +(http://\S+)/metrics +\(([\w-]+)\)|Ask it"):
            if not found[1]:
                break
            self.metrics[found[2]] = found[1]

    def printed(self, pattern: str) -> str:
        """The group of the pattern in what was read so far."""
        found = re.search(pattern, "\n".join(self.lines))
        assert found, f"no {pattern!r} in {self.lines}"
        return found[1]

    def children(self) -> dict[str, psutil.Process]:
        """The processes by name; of several shards, each with its rank: `shard-0`."""
        found = {}
        for child in psutil.Process(self.process.pid).children():
            words = child.cmdline()
            if len(words) > 2 and words[2] in PROCESSES:
                rank = words[words.index("--rank") + 1] if "--rank" in words else None
                found[words[2] if rank is None else f"{words[2]}-{rank}"] = child
        return found

    def get(self, process: str, path: str) -> str:
        """The body of an HTTP answer from a process's metrics port."""
        with urllib.request.urlopen(self.metrics[process] + path, timeout=10) as response:
            body: bytes = response.read()
        return body.decode()

    def metric(self, process: str, name: str, **labels: str) -> float:
        """The sum of a metric's samples that carry these labels."""
        total, seen = 0.0, False
        for line in self.get(process, "/metrics").splitlines():
            match = re.fullmatch(r"(\w+)(\{.*\})? (\S+)", line)
            wanted = [f'{key}="{value}"' for key, value in labels.items()]
            if match and match[1] == name and all(text in (match[2] or "") for text in wanted):
                total, seen = total + float(match[3]), True
        assert seen, f"{process} has no {name} {labels}"
        return total

    def used_blocks(self) -> int:
        return int(self.metric("scheduler", "pagoda_kv_blocks", tier="device", state="used"))

    def channel(self) -> grpc.Channel:
        return grpc.insecure_channel(self.address)

    def stub(self, channel: grpc.Channel) -> InferenceServiceStub:
        return InferenceServiceStub(channel)


def until(condition: Callable[[], bool], timeout_s: float = 20) -> None:
    """Polls what a process shows only from outside."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)


@contextmanager
def launched(*flags: str, **environ: str) -> Iterator[Stack]:
    """Starts `python -m launcher serve` on free ports; at the end no process of it is left.

    It ends with this process too, however that ends.
    """
    ports = [f"--{one}-metrics-address=127.0.0.1:0" for one in PROCESSES]
    ports += ["--listen-address=127.0.0.1:0", "--http-address=127.0.0.1:0"]
    command = [sys.executable, "-m", "launcher", "serve", "--exit-with-parent", *ports, *flags]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **environ},
        start_new_session=True,
    )
    stack = Stack(process)
    try:
        yield stack
    finally:
        family = []
        if process.poll() is None:
            launcher = psutil.Process(process.pid)
            family = [launcher, *launcher.children(recursive=True)]
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(40)
            except subprocess.TimeoutExpired:
                process.kill()
        _, alive = psutil.wait_procs(family, timeout=10)
        for one in alive:
            one.kill()
        assert not alive, f"outlived the launcher: {alive}"
