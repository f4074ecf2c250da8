"""What a process says of itself over HTTP: `/metrics`, `/startupz`, `/livez`, `/readyz`."""

import time
from collections.abc import Iterable
from wsgiref.types import StartResponse, WSGIEnvironment

from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, disable_created_metrics, generate_latest

from common.http import serve_http

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


def serve_probes(address: str, probes: Probes) -> int:
    """Serves `--metrics-address` on a daemon thread; returns the bound port.

    Raises:
        AddressError: the address is malformed or taken; the message names the option.
    """

    def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            start_response("405 Method Not Allowed", [("Allow", "GET, HEAD")])
            return []
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

    return serve_http("--metrics-address", address, app)
