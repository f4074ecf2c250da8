"""What is kept of a request, however it ends: one log line and one span, where they are wanted.

They hold counts and parameters. Text is in the log alone, and only if the operator asks for it.
"""

import asyncio
import logging
import math
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from common import logs
from common.tracing import trace_id
from pagoda.v1 import inference_pb2 as pb
from router import metrics
from router.errors import RequestError
from router.request_span import RequestSpan
from router.validation import MAX_REQUEST_ID_LENGTH

if TYPE_CHECKING:
    from common.otlp import Tracer
    from router.inference import Caller

# Of the prompt, and of all outputs together.
MAX_LOGGED_CHARACTERS: Final = 4096

_log = logging.getLogger(__name__)
# Whoever asks for these lines gets them, whatever the level of the rest.
_requests_log = logging.getLogger("router.requests")
_requests_log.setLevel(logging.INFO)


class RequestRecord:
    """One request, from its arrival to its end. To be entered, and left however it ends.

    Attributes:
        trace_context: The W3C traceparent to hand on, or nothing.
        usage: Tokens, once it is known how many.
    """

    def __init__(
        self, spec: pb.GenerateSpec, caller: "Caller", model: str, log_requests: str, tracer: "Tracer | None"
    ) -> None:
        """`model` is what is served, and `log_requests` the option of this name."""
        self.usage = pb.Usage()
        self._spec = spec
        self._caller = caller
        self._log_requests = log_requests
        self._request_id = spec.request_id[:MAX_REQUEST_ID_LENGTH]
        self._span = RequestSpan.start(tracer, spec, model, caller.trace_context) if tracer else None
        self.trace_context = self._span.traceparent if self._span else caller.trace_context
        self._resubmits = 0
        self._started = time.monotonic()
        self._first_token_s: float | None = None
        self._finish_reasons: dict[int, str] = {}
        self._texts: dict[int, str] = {}
        self._text_room = MAX_LOGGED_CHARACTERS if log_requests == "text" else 0

    def __enter__(self) -> "RequestRecord":
        logs.bind(trace_id=trace_id(self.trace_context))
        self.named(self._request_id)
        return self

    def named(self, request_id: str) -> None:
        """Its id is known, which may be the router's own."""
        self._request_id = request_id
        logs.bind(request_id=request_id)

    def resubmitted(self) -> None:
        """Its scheduler was lost, and it goes to another one."""
        self._resubmits += 1
        _log.info("submitted anew")
        if self._span:
            self._span.add_event("resubmit")

    def delivered(self, delta: pb.OutputDelta) -> None:
        """The client gets this."""
        if self._first_token_s is None and delta.token_ids:
            self._first_token_s = time.monotonic() - self._started
        if delta.finish_reason:
            name = pb.FinishReason.Name(delta.finish_reason)
            self._finish_reasons[delta.index] = name.removeprefix("FINISH_REASON_").lower()
        if text := delta.text[: self._text_room]:
            self._text_room -= len(text)
            self._texts[delta.index] = self._texts.get(delta.index, "") + text

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        seconds = time.monotonic() - self._started
        code = _code(error, deadline_passed=seconds >= (self._caller.time_remaining or float("inf")))
        finish_reasons = [reason for _, reason in sorted(self._finish_reasons.items())]
        metrics.count_tenant(self._caller.tenant.id, self.usage)
        if self._span:
            self._span.end(code, self._request_id, self.usage, finish_reasons)
        if self._log_requests == "off":
            return
        values = {
            "method": self._caller.method,
            "code": code,
            # Not its message, which may quote the prompt.
            "reason": error.reason if isinstance(error, RequestError) else None,
            "field": error.field if isinstance(error, RequestError) else None,
            "prompt_tokens": self.usage.prompt_tokens,
            "cached_tokens": self.usage.cached_tokens,
            "output_tokens": self.usage.completion_tokens,
            "n": self._spec.n or 1,
            "finish_reasons": finish_reasons,
            **_parameters(self._spec),
            "first_token_seconds": self._first_token_s and round(self._first_token_s, 6),
            "seconds": round(seconds, 6),
            "resubmits": self._resubmits,
        }
        if self._log_requests == "text":
            values["prompt"] = _prompt(self._spec)
            values["outputs"] = [text for _, text in sorted(self._texts.items())]
        _requests_log.info("request ended", extra=logs.fields(**values))


def _code(error: BaseException | None, deadline_passed: bool) -> str:
    match error:
        case None:
            return "OK"
        case RequestError():
            return error.code.name
        case asyncio.CancelledError() | GeneratorExit():
            return "DEADLINE_EXCEEDED" if deadline_passed else "CANCELLED"
        case _:
            return "INTERNAL"


def _parameters(spec: pb.GenerateSpec) -> dict[str, Any]:
    """What the client set beside the prompt: numbers as they are, and of tokens and strings how many."""
    return {
        "sampling": {field.name: _number(value) for field, value in spec.sampling.ListFields()},
        "max_tokens": spec.stop.max_tokens or None,
        "min_tokens": spec.stop.min_tokens or None,
        "stop_strings": len(spec.stop.strings) or None,
        "stop_tokens": len(spec.stop.token_ids) or None,
        "beam_width": spec.beam_search.beam_width or None,
        "priority": spec.priority or None,
    }


def _number(value: Any) -> object:
    """As the client wrote it: a float of 32 bits has no more digits; what isn't finite is no JSON number."""
    if isinstance(value, float):
        return float(f"{value:.7g}") if math.isfinite(value) else str(value)
    return value if isinstance(value, int) else len(value)


def _prompt(spec: pb.GenerateSpec) -> str:
    """The beginning of a prompt that was given as text; of a chat, one message after the other."""
    text, room = spec.text[:MAX_LOGGED_CHARACTERS], MAX_LOGGED_CHARACTERS
    for message in spec.chat.messages:
        text += f"{message.role}: {message.content[:room]}\n"
        room = MAX_LOGGED_CHARACTERS - len(text)
        if room <= 0:
            break
    return text[:MAX_LOGGED_CHARACTERS]
