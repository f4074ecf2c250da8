"""Traces of requests, for processes that are given a collector. OpenTelemetry is an optional dependency."""

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from common.otlp import Tracer

# Of the flags, which are the last byte of a W3C traceparent; its trace id follows the version.
_SAMPLED: Final = 1
_ENDPOINT: Final = re.compile(r"https?://[\w.\-\[\]:]+/?")


class TracingError(ValueError):
    """Traces are asked for and can't be had; the message names the option and says what to do."""


def trace_id(traceparent: str) -> str:
    """The trace that a checked traceparent belongs to; nothing, if it is empty."""
    return traceparent[3:35]


def is_sampled(traceparent: str) -> bool:
    """Whether a checked traceparent says that its trace is recorded."""
    return bool(traceparent) and int(traceparent[-2:], 16) & _SAMPLED != 0


def start_tracing(process: str, endpoint: str | None, sample_ratio: float = 0.0) -> "Tracer | None":
    """A tracer that exports to `--otlp-endpoint`; None, and nothing is imported, where none is given.

    A request whose client decided whether to trace it is traced as decided; of the others, `sample_ratio`.

    Raises:
        TracingError: the endpoint is malformed, or the packages are missing.
    """
    if endpoint is None:
        return None
    if not _ENDPOINT.fullmatch(endpoint):
        raise TracingError(f"--otlp-endpoint {endpoint!r} is not http://HOST:PORT or https://HOST:PORT")
    try:
        from common.otlp import Tracer
    except ModuleNotFoundError as error:
        message = (
            f"--otlp-endpoint needs OpenTelemetry, and {error.name} is missing: pip install '.[tracing]'"
        )
        raise TracingError(message) from error
    return Tracer(process, endpoint, sample_ratio)
