"""One bidirectional stream to one scheduler, made anew whenever it breaks."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Final, Protocol

import grpc

from common.rpc import aio_channel
from common.tls import ClientTls
from common.version import PROTOCOL_VERSION
from pagoda.scheduler.v1.scheduler_pb2 import (
    Abort,
    Hello,
    Load,
    RequestKey,
    RequestRefused,
    SequenceOutput,
    ServeRequest,
    ServeResponse,
    StepOutputs,
    Submit,
    Welcome,
)
from pagoda.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceStub
from router import metrics
from router.discovery import Endpoint

if TYPE_CHECKING:
    from pagoda.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceAsyncStub

BACKOFF_MIN_S: Final = 0.1
BACKOFF_MAX_S: Final = 1.0

_log = logging.getLogger(__name__)

Key = tuple[str, int]


class Sink(Protocol):
    """A submitted request, as its connection calls it. None of these may block."""

    def on_accepted(self) -> None: ...

    def on_refused(self, refused: RequestRefused) -> None:
        """Nothing more comes."""

    def on_token(self, output_index: int, token_id: int) -> None:
        """One token more, and nothing else."""

    def on_output(self, output: SequenceOutput) -> None: ...

    def on_lost(self) -> None:
        """The stream broke. Nothing more comes."""


class ProtocolError(Exception):
    """The scheduler doesn't speak as agreed."""


class Connection:
    """One stream, from its Hello to its end.

    Attributes:
        address: The scheduler's.
        welcome: What the scheduler serves; empty before it came.
        draining: The scheduler takes nothing new.
    """

    def __init__(self, hello: Hello, address: str = "") -> None:
        self.address = address
        self.welcome = Welcome()
        self.draining = False
        self._lost = False
        self._load = Load()
        self._unreported_tokens = 0
        self._live: dict[Key, Sink] = {}
        # By the numbers that the scheduler gave them.
        self._numbers: dict[Key, int] = {}
        self._numbered: dict[int, Sink] = {}
        # What a request has to say and what was not sent yet. A submit that still waits is withdrawn by
        # its abort, so that a scheduler that doesn't read makes this no longer than there are requests.
        self._outbox: dict[tuple[Key, int | None], ServeRequest] = {}
        self._wake = asyncio.Event()
        self._send(("", 0), None, ServeRequest(hello=hello))

    @property
    def outstanding_tokens(self) -> int:
        """Tokens still to compute: as last reported, and what was submitted since."""
        return self._load.outstanding_tokens + self._unreported_tokens

    @property
    def idle(self) -> bool:
        """Nothing runs there for this router."""
        return not self._live

    def submit(self, submit: Submit, sink: Sink) -> None:
        """Sends a request; its key must be new."""
        key = _key(submit.key)
        self._live[key] = sink
        self._unreported_tokens += len(submit.prompt_token_ids) + submit.max_tokens
        self._send(key, None, ServeRequest(submit=submit))

    def abort(self, key: Key, output_index: int | None = None) -> None:
        """Ends a request, or one of its outputs."""
        if output_index is None:
            self._forget(key)
            if self._outbox.pop((key, None), None) is not None:
                return
        wire_key = RequestKey(request_id=key[0], attempt=key[1])
        self._send(key, output_index, ServeRequest(abort=Abort(key=wire_key, output_index=output_index)))

    def forget(self, key: Key) -> None:
        """The request is over on both sides."""
        self._forget(key)

    def _send(self, key: Key, output_index: int | None, message: ServeRequest) -> None:
        self._outbox[key, output_index] = message
        self._wake.set()

    async def outgoing(self) -> AsyncIterator[ServeRequest]:
        """What is to be sent, until the stream is lost; gRPC doesn't stop asking for more by itself."""
        while not self._lost:
            await self._wake.wait()
            self._wake.clear()
            while self._outbox and not self._lost:
                yield self._outbox.pop(next(iter(self._outbox)))

    def dispatch(self, response: ServeResponse) -> None:
        """Hands a message to the requests that it is for; those of ended requests are dropped.

        Raises:
            ProtocolError: the scheduler's version isn't within one of ours.
        """
        match response.WhichOneof("message"):
            case "outputs":
                self._dispatch_tokens(response.outputs)
                for output in response.outputs.sequences:
                    if sink := self._live.get(_key(output.key)):
                        sink.on_output(output)
                if response.outputs.HasField("load"):
                    self._load, self._unreported_tokens = response.outputs.load, 0
            case "accepted":
                if sink := self._live.get(_key(response.accepted.key)):
                    self._numbers[_key(response.accepted.key)] = response.accepted.number
                    self._numbered[response.accepted.number] = sink
                    sink.on_accepted()
            case "refused":
                if sink := self._forget(_key(response.refused.key)):
                    sink.on_refused(response.refused)
            case "draining":
                self.draining = True
            case "welcome":
                version = response.welcome.protocol_version
                if abs(version - PROTOCOL_VERSION) > 1:
                    raise ProtocolError(
                        f"speaks protocol version {version} and this router {PROTOCOL_VERSION}: "
                        "they may be one apart"
                    )
                self.welcome, self._load = response.welcome, response.welcome.load

    def _dispatch_tokens(self, outputs: StepOutputs) -> None:
        for handle, token_id in zip(outputs.handles, outputs.token_ids, strict=True):
            if sink := self._numbered.get(handle >> 8):
                sink.on_token(handle & 0xFF, token_id)

    def _forget(self, key: Key) -> Sink | None:
        number = self._numbers.pop(key, None)
        if number is not None:
            del self._numbered[number]
        return self._live.pop(key, None)

    def lose(self) -> None:
        """Tells every live request that the stream is gone."""
        self._lost = True
        self._wake.set()
        sinks, self._live = list(self._live.values()), {}
        for sink in sinks:
            sink.on_lost()


class SchedulerLink:
    """Keeps a stream to one scheduler.

    Attributes:
        connection: The stream, from its Welcome to its end.
        revision: The model revision that the scheduler served last; empty before its first Welcome.
    """

    def __init__(
        self, endpoint: Endpoint, tls: ClientTls | None, router_id: str, on_change: Callable[[], None]
    ) -> None:
        """`run` connects; `on_change` is called when the connection comes, drains or goes."""
        self.connection: Connection | None = None
        self.revision = ""
        self._address = endpoint.address
        self._server_name = endpoint.server_name
        self._tls = tls
        self._hello = Hello(protocol_version=PROTOCOL_VERSION, router_id=router_id)
        self._on_change = on_change
        self._backoff_s = BACKOFF_MIN_S
        self._problem = ""
        metrics.SCHEDULER_UP.labels(self._address).set(0)
        # A counter that is there from the start: else its first event would be no increase.
        metrics.RECONNECTS.labels(self._address)

    async def run(self) -> None:
        """Connects, and reconnects with backoff, until cancelled."""
        try:
            await self._keep_connected()
        finally:
            # Addresses come and go; what is measured of them must not pile up.
            for metric in (metrics.SCHEDULER_UP, metrics.RECONNECTS):
                metric.remove(self._address)

    async def _keep_connected(self) -> None:
        while True:
            try:
                # A channel for each stream: a certificate may have been renewed since the last one.
                async with aio_channel(self._address, self._tls, self._server_name) as channel:
                    await self._serve(SchedulerServiceStub(channel))
                problem = "it closed the stream"
            except grpc.aio.AioRpcError as error:
                problem = f"{error.code().name}: {error.details()}"
            except ProtocolError as error:
                problem = str(error)
            except Exception:
                # Ours to mend, but a router without its schedulers would serve nobody.
                _log.exception("scheduler %s: a message broke the stream", self._address)
                problem = "internal error"
            if problem != self._problem:
                _log.warning("scheduler %s: %s; trying again", self._address, problem)
                self._problem = problem
            await asyncio.sleep(self._backoff_s)
            self._backoff_s = min(2 * self._backoff_s, BACKOFF_MAX_S)
            metrics.RECONNECTS.labels(self._address).inc()

    async def _serve(self, stub: "SchedulerServiceAsyncStub") -> None:
        connection = Connection(self._hello, self._address)
        call = stub.Serve(connection.outgoing())
        try:
            async for response in call:
                connection.dispatch(response)
                if response.HasField("welcome"):
                    self._up(connection)
                elif response.HasField("draining"):
                    self._on_change()
        finally:
            call.cancel()
            self.connection = None
            metrics.SCHEDULER_UP.labels(self._address).set(0)
            connection.lose()
            self._on_change()

    def _up(self, connection: Connection) -> None:
        self.connection, self.revision = connection, connection.welcome.model_revision
        self._backoff_s = BACKOFF_MIN_S
        self._problem = ""
        metrics.SCHEDULER_UP.labels(self._address).set(1)
        _log.info("scheduler %s: serves %s", self._address, connection.welcome.model_revision)
        self._on_change()


def _key(key: RequestKey) -> Key:
    return key.request_id, key.attempt
