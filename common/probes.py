"""What a process says of itself over HTTP: `/metrics`, `/startupz`, `/livez`, `/readyz`."""

import errno
import socket
import threading
import time
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, disable_created_metrics, generate_latest

from common.rpc import AddressError, split_host_port

# A gauge beside every counter and histogram, which nobody asked for.
disable_created_metrics()  # type: ignore[no-untyped-call]


class Probes:
    """Start-up, liveness and readiness of this process. Thread-safe: each field is set in one go.

    Liveness is this process's own loop ticking, never a peer's state: restarting a process because
    another is down helps nobody.
    """

    def __init__(self, stall_limit_s: float = 30.0) -> None:
        self.started = False
        self.ready = False
        self._stall_limit_s = stall_limit_s
        self._last_tick = time.monotonic()

    def tick(self) -> None:
        """The loop came round; call at least every few seconds."""
        self._last_tick = time.monotonic()

    @property
    def alive(self) -> bool:
        """Whether the loop ticked within the stall limit."""
        return time.monotonic() - self._last_tick < self._stall_limit_s


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 64


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = 10

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Probes come every few seconds; their lines would drown the log."""


def serve_probes(address: str, probes: Probes) -> int:
    """Serves `--metrics-address` on a daemon thread; returns the bound port.

    Raises:
        AddressError: the address is malformed or taken; the message names the option.
    """

    def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path == "/metrics":
            start_response("200 OK", [("Content-Type", CONTENT_TYPE_LATEST)])
            return [generate_latest(REGISTRY)]
        checks = {"/startupz": probes.started, "/livez": probes.alive, "/readyz": probes.ready}
        if path not in checks:
            status, body = "404 Not Found", "try /metrics, /startupz, /livez or /readyz\n"
        elif checks[path]:
            status, body = "200 OK", "ok\n"
        else:
            status, body = "503 Service Unavailable", "not yet\n"
        start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
        return [body.encode()]

    try:
        host, port = split_host_port(address)
        server = (_Server6 if ":" in host else _Server)((host, port), _Handler)
    except AddressError as error:
        raise AddressError(f"--metrics-address {error}") from error
    except OSError as error:
        reason = "already in use" if error.errno == errno.EADDRINUSE else error.strerror
        raise AddressError(f"--metrics-address {address}: {reason}") from error
    server.set_app(app)
    threading.Thread(target=server.serve_forever, name="probes", daemon=True).start()
    return int(server.server_port)
