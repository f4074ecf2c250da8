"""An OpenTelemetry collector that keeps what it gets."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)


@dataclass(frozen=True)
class Span:
    """One span as it was exported. Ids in hexadecimal, times in nanoseconds since 1970."""

    process: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start: int
    end: int
    attributes: dict[str, Any]
    events: list[tuple[str, dict[str, Any]]]
    server: bool
    failed: bool


class Collector(TraceServiceServicer):
    """Answers exports; `spans` of them are waited for."""

    def __init__(self) -> None:
        self.endpoint = ""
        self._arrived: SimpleQueue[Span] = SimpleQueue()

    def Export(  # noqa: N802
        self, request: ExportTraceServiceRequest, context: Any
    ) -> ExportTraceServiceResponse:
        for resource in request.resource_spans:
            process = _attributes(resource.resource)["service.name"]
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self._arrived.put(_span(process, span))
        return ExportTraceServiceResponse()

    def spans(self, count: int) -> list[Span]:
        """The next ones, in the order of their beginnings."""
        return sorted((self._arrived.get(timeout=20) for _ in range(count)), key=lambda span: span.start)


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector on a free port."""
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(0)


def _span(process: str, span: Any) -> Span:
    return Span(
        process,
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        _attributes(span),
        [(event.name, _attributes(event)) for event in span.events],
        span.kind == span.SPAN_KIND_SERVER,
        span.status.code == span.status.STATUS_CODE_ERROR,
    )


def _attributes(message: Any) -> dict[str, Any]:
    return {attribute.key: _value(attribute.value) for attribute in message.attributes}


def _value(value: Any) -> Any:
    if value.HasField("array_value"):
        return [_value(one) for one in value.array_value.values]
    return getattr(value, value.WhichOneof("value"))
