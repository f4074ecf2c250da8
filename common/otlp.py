"""Spans to an OpenTelemetry collector, over gRPC.

They are queued, and sent by a thread of its own. What the queue can't hold is dropped, so a collector that is
slow or away costs spans, and never a request.
"""

import logging
import threading
import uuid
from collections.abc import Sequence
from typing import Final

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

MAX_QUEUED_SPANS: Final = 2048
MAX_BATCH_SPANS: Final = 512
EXPORT_PERIOD_MS: Final = 1_000
EXPORT_TIMEOUT_S: Final = 5.0
CLOSE_TIMEOUT_S: Final = 2.0

_log = logging.getLogger(__name__)
_propagator: Final = TraceContextTextMapPropagator()

Attributes = dict[str, AttributeValue]


class Tracer:
    """Makes spans of one process, as children of what a W3C traceparent names."""

    def __init__(self, process: str, endpoint: str, sample_ratio: float) -> None:
        # They would say of every batch what _Exporter says once.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        exporter = _Exporter(endpoint)
        resource = {"service.name": f"pagoda-{process}", "service.instance.id": uuid.uuid4().hex}
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(sample_ratio)),
            resource=Resource.create(resource),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(
                exporter,
                max_queue_size=MAX_QUEUED_SPANS,
                schedule_delay_millis=EXPORT_PERIOD_MS,
                max_export_batch_size=MAX_BATCH_SPANS,
            )
        )
        self._tracer = self._provider.get_tracer("pagoda")

    def start(
        self,
        name: str,
        traceparent: str,
        *,
        server: bool = False,
        start_ns: int | None = None,
        attributes: Attributes | None = None,
    ) -> Span | None:
        """A span that has begun, now or at `start_ns` since 1970; None if the trace is not sampled.

        `server`: it is what this process does for a client of Pagoda.
        """
        parent = _propagator.extract({"traceparent": traceparent})
        kind = SpanKind.SERVER if server else SpanKind.INTERNAL
        span = self._tracer.start_span(name, parent, kind, attributes, start_time=start_ns)
        return span if span.is_recording() else None

    def traceparent(self, span: Span) -> str:
        """What makes other processes' spans children of this one."""
        context = span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    def fail(self, span: Span, kind: str) -> None:
        """Marks a span as failed, by an error of this kind."""
        span.set_attribute("error.type", kind)
        span.set_status(StatusCode.ERROR)

    def close(self) -> None:
        """Sends what is queued, within a time limit."""
        closing = threading.Thread(target=self._provider.shutdown, name="close-tracer", daemon=True)
        closing.start()
        closing.join(CLOSE_TIMEOUT_S)


class _Exporter(SpanExporter):
    """Says once that the collector is away, and once that it is back."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._away = False
        self._inner = OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._inner.export(spans)
        away = result is not SpanExportResult.SUCCESS
        if away and not self._away:
            _log.warning("the trace collector at %s takes no spans; they are dropped", self._endpoint)
        elif self._away and not away:
            _log.info("the trace collector at %s takes spans again", self._endpoint)
        self._away = away
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()
