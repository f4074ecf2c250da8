"""The block map: a web page of a scheduler's blocks and tables as they are, for people to look at.

It shows request ids and memory, never text or tokens. The page polls `/api/map`; whoever may connect may
look, so the address belongs on loopback.
"""

import ipaddress
import json
import threading
import time
from collections.abc import Iterable, Sequence
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import parse_qs
from wsgiref.types import StartResponse, WSGIEnvironment

import grpc

from common.http import serve_http
from common.rpc import AddressError, channel, split_host_port
from common.tls import ClientTls
from pagoda.scheduler.v1.scheduler_pb2 import GetBlockMapRequest, GetBlockMapResponse, SequenceState
from pagoda.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceStub
from router.static_files import HEADERS, read_page

RPC_TIMEOUT_S: Final = 2.0
# Any number of viewers costs a scheduler what one does.
MAX_AGE_S: Final = 0.2

_JSON: Final = "application/json"


class _HTTPError(Exception):
    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Scheduler:
    """The latest map of one scheduler, asked for when it is wanted."""

    def __init__(self, address: str, tls: ClientTls | None) -> None:
        self._address = address
        self._tls = tls
        self._channel: grpc.Channel | None = None
        self._lock = threading.Lock()
        self._asked_at = -MAX_AGE_S
        self._answer: bytes | tuple[HTTPStatus, str] = b""

    def block_map(self) -> bytes:
        """As JSON.

        Raises:
            _HTTPError: the scheduler gave none.
        """
        with self._lock:
            if time.monotonic() - self._asked_at >= MAX_AGE_S:
                self._answer = self._ask()
                self._asked_at = time.monotonic()
            if isinstance(self._answer, tuple):
                raise _HTTPError(*self._answer)
            return self._answer

    def _ask(self) -> bytes | tuple[HTTPStatus, str]:
        self._channel = self._channel or channel(self._address, self._tls)
        try:
            stub = SchedulerServiceStub(self._channel)
            return _json(to_dict(stub.GetBlockMap(GetBlockMapRequest(), timeout=RPC_TIMEOUT_S)))
        except grpc.RpcError as error:
            # Another one next time: certificates may have been renewed since this one was made.
            self._channel.close()
            self._channel = None
            status = {
                grpc.StatusCode.UNAVAILABLE: HTTPStatus.SERVICE_UNAVAILABLE,
                grpc.StatusCode.DEADLINE_EXCEEDED: HTTPStatus.GATEWAY_TIMEOUT,
            }.get(error.code(), HTTPStatus.BAD_GATEWAY)
            return status, f"{error.code().name}: {error.details()}"


def to_dict(block_map: GetBlockMapResponse) -> dict[str, Any]:
    """The map as in its proto, but `cached` lists the ids of such blocks and states are in lower case."""
    return {
        "block_size": block_map.block_size,
        "num_blocks": block_map.num_blocks,
        "num_host_blocks": block_map.num_host_blocks,
        "ref_counts": list(block_map.ref_counts),
        "cached": [block for block, cached in enumerate(block_map.cached) if cached],
        "sequences": [
            {
                "request_id": sequence.request_id,
                "output_index": sequence.output_index,
                "state": SequenceState.Name(sequence.state).removeprefix("SEQUENCE_STATE_").lower(),
                "block_ids": list(sequence.block_ids),
                "num_tokens": sequence.num_tokens,
                "num_computed_tokens": sequence.num_computed_tokens,
            }
            for sequence in block_map.sequences
        ],
        "preemptions": block_map.preemptions,
        "copies": block_map.copies,
        "evictions": block_map.evictions,
        "step": block_map.step,
    }


class _App:
    """The WSGI application."""

    def __init__(self, host: str, scheduler_addresses: Sequence[str], tls: ClientTls | None) -> None:
        self._host = host
        self._addresses = list(scheduler_addresses)
        # By the number that a request may give.
        self._schedulers = {str(i): _Scheduler(address, tls) for i, address in enumerate(scheduler_addresses)}
        # By exact path: no request's path ever reaches the file system.
        self._files = {f"/{name}": file for name, file in read_page("block_map").items()}
        self._files["/"] = self._files.pop("/index.html")

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        status = HTTPStatus.OK
        try:
            content_type, body = self._get(environ)
        except _HTTPError as error:
            status = error.status
            content_type, body = _JSON, _json({"error": {"status": status, "message": str(error)}})
        headers = [("Content-Type", content_type), ("Content-Length", str(len(body))), *HEADERS.items()]
        if status is HTTPStatus.METHOD_NOT_ALLOWED:
            headers.append(("Allow", "GET, HEAD"))
        start_response(f"{int(status)} {status.phrase}", headers)
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]

    def _get(self, environ: WSGIEnvironment) -> tuple[str, bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        if method not in ("GET", "HEAD"):
            raise _HTTPError(HTTPStatus.METHOD_NOT_ALLOWED, f"{method}: only GET and HEAD are served")
        self._check_host(environ.get("HTTP_HOST", ""))
        if path == "/api/schedulers":
            return _JSON, _json({"schedulers": self._addresses})
        if path == "/api/map":
            return _JSON, self._chosen(environ["QUERY_STRING"]).block_map()
        if path not in self._files:
            raise _HTTPError(HTTPStatus.NOT_FOUND, "no such path; try /, /api/schedulers or /api/map")
        return self._files[path].content_type, self._files[path].body

    def _check_host(self, given: str) -> None:
        """Refuses names: a hostile site could point one of its own here, and its scripts read all replies."""
        try:
            host = split_host_port(given)[0]
        except AddressError:
            host = given.removeprefix("[").removesuffix("]")
        if host.lower() in ("localhost", self._host.lower()):
            return
        try:
            ipaddress.ip_address(host)
        except ValueError:
            message = "Host: give an IP address, localhost or the host of --block-map-address"
            raise _HTTPError(HTTPStatus.FORBIDDEN, message) from None

    def _chosen(self, query: str) -> _Scheduler:
        given = parse_qs(query).get("scheduler", ["0"])[-1]
        if given not in self._schedulers:
            last = len(self._schedulers) - 1
            raise _HTTPError(HTTPStatus.BAD_REQUEST, f"scheduler: {given[:40]!r} is not from 0 to {last}")
        return self._schedulers[given]


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def serve_block_map(address: str, scheduler_addresses: Sequence[str], tls: ClientTls | None = None) -> int:
    """Serves the page on `--block-map-address` from daemon threads; returns the bound port.

    Raises:
        AddressError: the address is malformed or taken; the message names the option.
    """
    host = address.rpartition(":")[0].removeprefix("[").removesuffix("]")
    return serve_http("--block-map-address", address, _App(host, scheduler_addresses, tls))
