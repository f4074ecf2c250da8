"""A request's time in this scheduler as spans: queue, prefill, decode. Made when it has ended."""

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from common.otlp import Attributes, Tracer


@dataclass
class _Phase:
    name: str
    start_ns: int
    events: list[tuple[int, str, "Attributes"]] = field(default_factory=list)


class RequestTrace:
    """When a request came, was admitted, had its first token, and what held it up since."""

    def __init__(self, tracer: "Tracer", trace_context: str) -> None:
        self._tracer = tracer
        self._trace_context = trace_context
        self._phases = [_Phase("queue", time.time_ns())]

    def admitted(self) -> None:
        """It takes part in the next step, for the first time or again."""
        if self._phases[-1].name == "queue":
            self._phases.append(_Phase("prefill", time.time_ns()))

    def sampled(self) -> None:
        """A token came back."""
        if self._phases[-1].name == "prefill":
            self._phases.append(_Phase("decode", time.time_ns()))

    def event(self, name: str, **attributes: str) -> None:
        """Something that holds it up happened now."""
        self._phases[-1].events.append((time.time_ns(), name, dict(attributes)))

    def end(self, attributes: "Attributes") -> None:
        """It has ended; its spans are exported with `attributes` on each."""
        ends = [*(phase.start_ns for phase in self._phases[1:]), time.time_ns()]
        for phase, end_ns in zip(self._phases, ends, strict=True):
            span = self._tracer.start(
                phase.name, self._trace_context, start_ns=phase.start_ns, attributes=attributes
            )
            if span is None:
                return
            for moment, name, values in phase.events:
                span.add_event(name, values, moment)
            span.end(end_ns)
