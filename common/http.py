"""A small HTTP server on a thread of its own, for what a process says of itself."""

import errno
import logging
import socket
import threading
from socketserver import ThreadingMixIn
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import WSGIApplication

from common.rpc import AddressError, split_host_port

# More wait in the listen queue.
MAX_CONNECTIONS: Final = 64
# Of connections that a server of `listen` hasn't taken yet.
BACKLOG: Final = 1024

_log = logging.getLogger(__name__)


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, address: tuple[str, int]) -> None:
        self._free = threading.Semaphore(MAX_CONNECTIONS)
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._free.acquire()
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away or was too slow is no news."""
        _log.debug("a connection from %s broke", client_address, exc_info=True)


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = 10

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Requests come several times a minute or second; their lines would drown the log."""


def listen(option: str, address: str) -> socket.socket:
    """A socket that listens on `HOST:PORT`. `option` gave the address.

    Raises:
        AddressError: the address is malformed or taken; the message names the option.
    """
    try:
        host, port = split_host_port(address)
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except AddressError as error:
        raise AddressError(f"{option} {error}") from error
    except OSError as error:
        raise AddressError(f"{option} {address}: {error.strerror}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(target)
        # Only now is the port taken.
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise AddressError(f"{option} {address}: {_reason(error)}") from error
    return listener


def _reason(error: OSError) -> str | None:
    return "already in use" if error.errno == errno.EADDRINUSE else error.strerror


def serve_http(option: str, address: str, app: WSGIApplication) -> int:
    """Serves `app` on `HOST:PORT` from daemon threads; returns the bound port. `option` gave the address.

    Raises:
        AddressError: the address is malformed or taken; the message names the option.
    """
    try:
        host, port = split_host_port(address)
        server = (_Server6 if ":" in host else _Server)((host, port))
    except AddressError as error:
        raise AddressError(f"{option} {error}") from error
    except OSError as error:
        raise AddressError(f"{option} {address}: {_reason(error)}") from error
    server.set_app(app)
    threading.Thread(target=server.serve_forever, name=option.removeprefix("--"), daemon=True).start()
    return int(server.server_port)
