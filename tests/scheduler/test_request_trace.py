"""What holds a request up is told as events of the phase that it holds up."""

from collections.abc import Iterator

import pytest

from common.otlp import Tracer
from scheduler.request_trace import RequestTrace
from tests.collector import Collector, collecting
from tests.scheduler.harness import Harness, limits, submit
from tests.scheduler.test_engine import serving

SAMPLED = f"00-{'a' * 32}-{'b' * 16}-01"


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_preemption_is_an_event_with_its_mode(collector: Collector, mode: str) -> None:
    harness = Harness(limits(num_blocks=6, num_host_blocks=6, preemption_mode=mode))
    tracer = Tracer("scheduler", collector.endpoint, 0)
    harness.add(submit("first", [1, 2, 3, 4], 12))
    second = harness.add(submit("second", [5, 6, 7, 8], 12))
    second.trace = RequestTrace(tracer, SAMPLED)
    harness.run()

    second.trace.end({})
    tracer.close()

    queue, prefill, decode = collector.spans(3)
    assert [span.name for span in (queue, prefill, decode)] == ["queue", "prefill", "decode"]
    assert decode.events == [("preempted", {"mode": mode})]
    assert not queue.events + prefill.events


async def test_a_lost_shard_is_an_event_of_each_traced_request(collector: Collector) -> None:
    tracer = Tracer("scheduler", collector.endpoint, 0)
    async with serving(tracer=tracer) as (engine, client, router):
        client.may_answer.clear()
        engine.submit(router.outbox, submit("traced", [1, 2], 5, trace_context=SAMPLED))
        engine.submit(router.outbox, submit("other", [3, 4], 5))
        await client.until_sent(1)
        client.lose()
        client.may_answer.set()
        await router.until(lambda: len(router.reasons) == 2)
    tracer.close()

    spans = collector.spans(3)
    assert [event for span in spans for event in span.events] == [("shard_lost", {})]
    assert {span.attributes["gen_ai.response.id"] for span in spans} == {"traced"}


def test_a_request_that_ends_in_the_queue_has_one_span(collector: Collector) -> None:
    tracer = Tracer("scheduler", collector.endpoint, 0)
    trace = RequestTrace(tracer, SAMPLED)
    trace.event("shard_lost")

    trace.end({"gen_ai.response.id": "mine"})
    tracer.close()

    (queue,) = collector.spans(1)
    assert (queue.name, queue.parent_id, queue.trace_id) == ("queue", "b" * 16, "a" * 32)
    assert queue.events == [("shard_lost", {})]
    assert queue.attributes == {"gen_ai.response.id": "mine"}
