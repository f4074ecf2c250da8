import subprocess
import sys

import pytest

from common.otlp import Tracer
from common.tracing import TracingError, is_sampled, start_tracing
from tests.collector import collecting

TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED, NOT_SAMPLED = f"00-{TRACE_ID}-{PARENT_ID}-01", f"00-{TRACE_ID}-{PARENT_ID}-00"


def test_without_an_endpoint_nothing_is_imported() -> None:
    code = (
        "import sys, router.__main__, scheduler.server; from common.tracing import start_tracing; "
        "print(start_tracing('router', None), [name for name in sys.modules if 'opentelemetry' in name])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.stdout == "None []\n"


@pytest.mark.parametrize("endpoint", ["", "collector:4317", "http://", "ftp://a:1", "http://a:1/v1/traces"])
def test_a_malformed_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(TracingError, match=r"^--otlp-endpoint .* is not http://HOST:PORT"):
        start_tracing("router", endpoint)


@pytest.mark.parametrize("process", ["router", "scheduler"])
def test_missing_packages_end_the_process_with_one_line(process: str) -> None:
    code = (
        f"import sys; sys.modules['opentelemetry'] = None; import runpy; "
        f"runpy.run_module('{process}', run_name='__main__', alter_sys=True)"
    )
    flags = {
        "router": ["--model=x", "--scheduler-addresses=127.0.0.1:1"],
        "scheduler": ["--shard-addresses=127.0.0.1:1"],
    }
    common = ["--metrics-address=127.0.0.1:0", "--listen-address=127.0.0.1:0", "--otlp-endpoint=http://a:1"]
    done = subprocess.run(
        [sys.executable, "-c", code, *common, *flags[process]], capture_output=True, text=True, timeout=30
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "--otlp-endpoint needs OpenTelemetry" in done.stderr
    assert done.stderr.endswith("is missing: pip install '.[tracing]'\n")


@pytest.mark.parametrize(
    ("traceparent", "ratio", "traced"),
    [(SAMPLED, 0, True), (NOT_SAMPLED, 1, False), ("", 0, False), ("", 1, True)],
)
def test_a_client_decides_about_its_trace_and_the_ratio_about_others(
    traceparent: str, ratio: float, traced: bool
) -> None:
    tracer = Tracer("router", "http://127.0.0.1:1", ratio)
    assert (tracer.start("request", traceparent) is not None) == traced


def test_a_span_arrives_under_its_parent() -> None:
    with collecting() as collector:
        tracer = Tracer("router", collector.endpoint, 0)
        span = tracer.start("request", SAMPLED, server=True, attributes={"a": 1})
        assert span
        tracer.fail(span, "INTERNAL")
        span.end()
        tracer.close()

        (seen,) = collector.spans(1)

    assert (seen.process, seen.name, seen.server, seen.failed) == ("pagoda-router", "request", True, True)
    assert (seen.trace_id, seen.parent_id) == (TRACE_ID, PARENT_ID)
    assert seen.attributes == {"a": 1, "error.type": "INTERNAL"}
    assert tracer.traceparent(span) == f"00-{TRACE_ID}-{seen.span_id}-01"


def test_a_collector_that_is_away_costs_one_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Too short for a second attempt.
    monkeypatch.setattr("common.otlp.EXPORT_TIMEOUT_S", 0.5)
    tracer = Tracer("router", "http://127.0.0.1:1", 1)
    for _ in range(3):
        span = tracer.start("request", "")
        assert span
        span.end()
        tracer._provider.force_flush()

    assert [record.getMessage() for record in caplog.records] == [
        "the trace collector at http://127.0.0.1:1 takes no spans; they are dropped"
    ]


@pytest.mark.parametrize(("traceparent", "sampled"), [(SAMPLED, True), (NOT_SAMPLED, False), ("", False)])
def test_the_flag_says_whether_a_trace_is_recorded(traceparent: str, sampled: bool) -> None:
    assert is_sampled(traceparent) == sampled
