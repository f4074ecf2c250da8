"""A request as a span, by OpenTelemetry's conventions for generative AI. No text."""

from typing import TYPE_CHECKING, Any, Final

from pagoda.v1 import inference_pb2 as pb

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from common.otlp import Tracer

# Not what a client did wrong, or no longer wants.
_FAULTS: Final = ("DEADLINE_EXCEEDED", "INTERNAL", "UNAVAILABLE", "UNIMPLEMENTED", "UNKNOWN")
_SAMPLING: Final = ("temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty")


class RequestSpan:
    """From a request's arrival at the router to its end.

    Attributes:
        traceparent: What makes the scheduler's spans its children.
    """

    def __init__(self, tracer: "Tracer", span: "Span") -> None:
        self.traceparent = tracer.traceparent(span)
        self._tracer = tracer
        self._span = span

    @staticmethod
    def start(tracer: "Tracer", spec: pb.GenerateSpec, model: str, traceparent: str) -> "RequestSpan | None":
        """None if its trace is not sampled. `traceparent` is the client's, or empty."""
        operation = "chat" if spec.HasField("chat") else "text_completion"
        span = tracer.start(f"{operation} {model}", traceparent, server=True)
        if span is None:
            return None
        span.set_attributes(
            {
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "pagoda",
                "gen_ai.request.model": model,
                **_request_attributes(spec),
            }
        )
        return RequestSpan(tracer, span)

    def add_event(self, name: str) -> None:
        """Something happened to the request now."""
        self._span.add_event(name)

    def end(self, code: str, request_id: str, usage: pb.Usage, finish_reasons: list[str]) -> None:
        """`code` is the name of the gRPC status with which the request ended."""
        self._span.set_attributes(
            {
                "gen_ai.response.id": request_id,
                "gen_ai.response.finish_reasons": finish_reasons,
                "gen_ai.usage.input_tokens": usage.prompt_tokens,
                "gen_ai.usage.output_tokens": usage.completion_tokens,
                "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
                "rpc.response.status_code": code,
            }
        )
        if code in _FAULTS:
            self._tracer.fail(self._span, code)
        self._span.end()


def _request_attributes(spec: pb.GenerateSpec) -> dict[str, Any]:
    attributes = {
        f"gen_ai.request.{name}": getattr(spec.sampling, name)
        for name in _SAMPLING
        if spec.sampling.HasField(name)
    }
    if spec.stop.max_tokens:
        attributes["gen_ai.request.max_tokens"] = spec.stop.max_tokens
    if spec.n > 1:
        attributes["gen_ai.request.choice.count"] = spec.n
    return attributes
