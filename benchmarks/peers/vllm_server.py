"""vLLM's own server of OpenAI's API, as a process."""

import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

Message = dict[str, Any]
_servers: list["subprocess.Popen[bytes]"] = []


def load(options: Message) -> Callable[[Message], Message]:
    """Returns once it serves at `options["address"]`."""
    host, _, port = options["address"].rpartition(":")
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", options["model"]]
    command += ["--served-model-name", options["served_model_name"], "--dtype", options["dtype"]]
    command += ["--host", host, "--port", port, "--max-model-len", "8192", "--max-num-seqs", "64"]
    command += ["--block-size", "128", "--no-enable-prefix-caching", "--disable-uvicorn-access-log"]
    server = subprocess.Popen(command)  # noqa: S603
    _servers.append(server)
    while not _healthy(options["address"]):
        if server.poll() is not None:
            raise RuntimeError(f"vLLM's server ended with status {server.returncode}")
        time.sleep(0.5)
    return lambda message: {}


def close() -> None:
    """Ends the server."""
    for server in _servers:
        server.terminate()
        server.wait()


def _healthy(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://{address}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
