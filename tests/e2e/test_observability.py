"""What real processes tell of a request: spans to a collector, and lines of JSON."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagoda.v1 import inference_pb2 as pb
from tests.collector import Collector, collecting
from tests.e2e.client import spec
from tests.e2e.stack import Stack, launched

pytestmark = pytest.mark.e2e

PARENT_ID = "00f067aa0ba902b7"


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="module")
def traced_stack(tiny_model_folder: Path, collector: Collector) -> Iterator[Stack]:
    flags = ("--log-level=info", "--log-format=json", "--log-requests=summary")
    with launched(f"--model={tiny_model_folder}", f"--otlp-endpoint={collector.endpoint}", *flags) as stack:
        stack.wait_ready()
        yield stack


def ask(stack: Stack, trace_id: str, flags: str) -> pb.Usage:
    metadata = (("traceparent", f"00-{trace_id}-{PARENT_ID}-{flags}"),)
    with stack.channel() as channel:
        request = pb.GenerateStreamRequest(spec=spec("a", max_tokens=5, ignore_eos=True))
        request.spec.request_id = "mine"
        (*_, last) = stack.stub(channel).GenerateStream(request, timeout=60, metadata=metadata)
    return last.usage


def test_a_sampled_request_is_one_span_with_three_children(traced_stack: Stack, collector: Collector) -> None:
    usage = ask(traced_stack, "a" * 32, "01")

    request, *phases = collector.spans(4)

    assert (request.process, request.server, request.parent_id) == ("pagoda-router", True, PARENT_ID)
    assert request.name == f"text_completion {request.attributes['gen_ai.request.model']}"
    assert request.attributes["gen_ai.response.id"] == "mine"
    assert request.attributes["gen_ai.usage.input_tokens"] == usage.prompt_tokens
    assert request.attributes["gen_ai.usage.output_tokens"] == usage.completion_tokens == 5
    assert request.attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert [(span.process, span.name) for span in phases] == [
        ("pagoda-scheduler", name) for name in ("queue", "prefill", "decode")
    ]
    for span in (request, *phases):
        assert span.trace_id == "a" * 32
        assert span.start <= span.end
    assert {span.parent_id for span in phases} == {request.span_id}
    assert [span.end for span in phases[:-1]] == [span.start for span in phases[1:]]


def test_a_request_that_is_not_sampled_has_no_spans(traced_stack: Stack, collector: Collector) -> None:
    ask(traced_stack, "b" * 32, "00")
    ask(traced_stack, "c" * 32, "01")

    assert {span.trace_id for span in collector.spans(4)} == {"c" * 32}


def test_the_processes_log_lines_of_json(traced_stack: Stack, collector: Collector) -> None:
    ask(traced_stack, "d" * 32, "01")
    collector.spans(4)

    traced_stack.wait_line(f'"trace_id": "{"d" * 32}"')

    lines = [json.loads(line) for line in traced_stack.lines if line.startswith("{")]
    assert {line["process"] for line in lines} == {"router", "scheduler", "shard"}
    assert (lines[-1]["message"], lines[-1]["request_id"]) == ("request ended", "mine")
    assert (lines[-1]["code"], lines[-1]["output_tokens"]) == ("OK", 5)
