"""What can be known to fail before anything starts. Each failure is one line: the thing, and what to do.

Imports nothing that may be missing.
"""

import errno
import importlib.metadata
import importlib.util
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHAT_MODULES = (
    "grpc",
    "google.protobuf",
    "grpc_health",
    "grpc_reflection",
    "yaml",
    "prometheus_client",
    "rich",
)
SERVE_MODULES = (
    *CHAT_MODULES,
    "fastapi",
    "grpc_status",
    "jinja2",
    "tokenizers",
    "uvicorn",
    "gguf",
    "numpy",
    "safetensors",
    "torch",
)


class PreflightError(Exception):
    """Something outside has to change first; the message says what."""


def check_installation(command: str) -> None:
    """Checks that packages and generated stubs are there for `command`, and none that would be mistaken."""
    missing = [
        name for name in (SERVE_MODULES if command == "serve" else CHAT_MODULES) if not _importable(name)
    ]
    if missing:
        raise PreflightError(
            f"{sys.executable} lacks {', '.join(missing)}: run `make {command}`, which installs them"
        )
    if not (ROOT / "pagoda/v1/inference_pb2.py").exists():
        raise PreflightError(f"{ROOT / 'pagoda'} holds no generated stubs: run `make protos`")
    if command == "serve" and _installed("kernels"):
        raise PreflightError(
            "Hugging Face's package `kernels` is installed here, and transformers would take Pagoda's folder "
            f"of that name for it: run `{sys.executable} -m pip uninstall kernels`"
        )


def _importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def check_model(path: Path) -> None:
    """Checks that `path` is a .gguf file or a model folder that the shard knows."""
    if not path.exists():
        raise PreflightError(f"--model {path}: no such file or folder")
    if path.is_file():
        if path.suffix != ".gguf":
            raise PreflightError(f"--model {path}: neither a folder nor a .gguf file")
        return
    # Both read this file; the router needs no other from the folder.
    for name in ("config.json", "tokenizer.json"):
        if not (path / name).is_file():
            raise PreflightError(f"--model {path}: no {name} in it; a Hugging Face model folder has one")
    from shard.model_config import ModelError, load_model_config

    try:
        load_model_config(path)
    except ModelError as error:
        raise PreflightError(f"--model {path}: {error}") from error


def claim_addresses(addresses: Mapping[str, str]) -> dict[str, str]:
    """Checks that every address (by option name) can be listened on, and gives port 0 a free port."""
    from common.rpc import AddressError, split_host_port

    claimed: dict[str, str] = {}
    sockets: list[socket.socket] = []
    try:
        # All stay bound until the last is, so that two options can't be given one port.
        for option, address in addresses.items():
            try:
                host, port = split_host_port(address)
                sockets.append(_listen(host, port))
            except AddressError as error:
                raise PreflightError(f"--{option}: {error}") from error
            except OSError as error:
                raise PreflightError(f"--{option} {address}: {_reason(error)}") from error
            bound = sockets[-1].getsockname()[1]
            claimed[option] = f"[{host}]:{bound}" if ":" in host else f"{host}:{bound}"
    finally:
        for one in sockets:
            one.close()
    return claimed


def _listen(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        # As the servers do: connections of a server just stopped may linger.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1)
    except OSError:
        listener.close()
        raise
    return listener


def _reason(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "the port is in use; stop what listens there, or choose another"
    if error.errno == errno.EACCES:
        return "the port is not open to this user; choose one from 1024 up"
    return f"can't be listened on ({error.strerror})"
