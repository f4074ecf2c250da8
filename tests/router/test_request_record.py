"""The line that is logged of a request that ended, however it ended."""

import asyncio
import json
import logging
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from common import logs
from common.tracing import is_sampled
from pagoda.v1 import inference_pb2 as pb
from pagoda.v1.sampling_pb2 import SamplingParams
from router.request_record import MAX_LOGGED_CHARACTERS
from tests.collector import collecting
from tests.router.conftest import Client, StartRouter
from tests.router.fake_scheduler import LENGTH, STOP, FakeScheduler
from tests.router.models import byte_level_bpe

TOKENIZER = byte_level_bpe()
ENVELOPE = ("time", "level", "process", "logger", "message")
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"


class Lines(logging.Handler):
    """The router's JSON lines as they come."""

    def __init__(self, printer: logging.Handler) -> None:
        super().__init__()
        self._printer = printer
        self._lines: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    def emit(self, record: logging.LogRecord) -> None:
        self._printer.filter(record)
        self._lines.put_nowait(json.loads(self._printer.format(record)))

    async def of(self, logger: str) -> dict[str, Any]:
        """The next line of this logger, without what every line has."""
        async with asyncio.timeout(10):
            while (line := await self._lines.get())["logger"] != logger:
                pass
        return {name: value for name, value in line.items() if name not in ENVELOPE}

    async def ended(self) -> dict[str, Any]:
        return await self.of("router.requests")

    def silent(self) -> bool:
        return self._lines.empty()


@pytest.fixture
def lines() -> Iterator[Lines]:
    root, router = logging.getLogger(), logging.getLogger("router")
    before = root.handlers[:]
    root.handlers.clear()
    logs.setup("router", "warning", "json")
    (printer,) = root.handlers
    root.handlers[:] = before
    handler = Lines(printer)
    router.addHandler(handler)
    yield handler
    router.removeHandler(handler)


def spec(**fields: Any) -> pb.GenerateSpec:
    return pb.GenerateSpec(**({"text": "quick fox"} | fields))


def generate(client: Client, spec: pb.GenerateSpec, **call: Any) -> Any:
    return client.stub.Generate(pb.GenerateRequest(spec=spec), **call)


async def test_a_summary_has_counts_and_no_text(start_router: StartRouter, lines: Lines) -> None:
    client = await start_router(log_requests="summary")
    stop = pb.StopConditions(max_tokens=9, strings=["secret", "wasted"], token_ids=[5])
    sampling = SamplingParams(temperature=0.7, seed=3)
    call = generate(client, spec(sampling=sampling, stop=stop, n=2, request_id="mine"))
    submit = await client.scheduler.accept()
    client.scheduler.send(submit, TOKENIZER.encode("nothing").ids, STOP, cached_tokens=2)
    client.scheduler.send(submit, TOKENIZER.encode("more").ids, LENGTH, output_index=1)
    await call

    logged = await lines.ended()

    tokens = [len(TOKENIZER.encode(text).ids) for text in ("quick fox", "nothing", "more")]
    assert 0 <= logged.pop("first_token_seconds") <= logged.pop("seconds")
    assert logged == {
        "request_id": "mine",
        "method": "Generate",
        "code": "OK",
        "prompt_tokens": tokens[0],
        "cached_tokens": 2,
        "output_tokens": tokens[1] + tokens[2],
        "n": 2,
        "finish_reasons": ["stop", "length"],
        "sampling": {"temperature": 0.7, "seed": 3},
        "max_tokens": 9,
        "stop_strings": 2,
        "stop_tokens": 1,
        "resubmits": 0,
    }


async def test_a_refused_request_has_its_reason_and_not_its_message(
    start_router: StartRouter, lines: Lines
) -> None:
    client = await start_router(log_requests="summary")
    with pytest.raises(grpc.aio.AioRpcError):
        await generate(client, spec(model="a secret", request_id="mine"))

    logged = await lines.ended()

    assert (logged["request_id"], logged["code"]) == ("mine", "NOT_FOUND")
    assert (logged["reason"], logged["field"]) == ("MODEL_NOT_FOUND", "spec.model")
    assert "secret" not in json.dumps(logged)


async def test_a_request_that_is_never_admitted_is_logged(start_router: StartRouter, lines: Lines) -> None:
    client = await start_router(log_requests="summary")
    client.router.inference.refusing = True
    with pytest.raises(grpc.aio.AioRpcError):
        await generate(client, spec())

    assert (await lines.ended())["reason"] == "SHUTTING_DOWN"


async def test_a_cancelled_stream_has_what_it_had_got(start_router: StartRouter, lines: Lines) -> None:
    client = await start_router(log_requests="summary")
    call = client.stub.GenerateStream(pb.GenerateStreamRequest(spec=spec()))
    submit = await client.scheduler.accept()
    client.scheduler.send(submit, [40])
    await call.read()
    await call.read()
    call.cancel()

    logged = await lines.ended()

    assert (logged["method"], logged["code"]) == ("GenerateStream", "CANCELLED")
    assert logged["output_tokens"] == 1
    assert "finish_reasons" not in logged


async def test_a_deadline_that_passed_is_named(start_router: StartRouter, lines: Lines) -> None:
    client = await start_router(log_requests="summary")
    with pytest.raises(grpc.aio.AioRpcError):
        await generate(client, spec(), timeout=0.2)

    assert (await lines.ended())["code"] == "DEADLINE_EXCEEDED"


async def test_resubmits_are_counted(start_router: StartRouter, lines: Lines) -> None:
    client = await start_router([FakeScheduler(), FakeScheduler()], log_requests="summary")
    first, second = client.schedulers
    call = generate(client, spec())
    submit = await first.accept()
    first.send(submit, TOKENIZER.encode("a").ids)
    first.drop()
    second.send(await second.accept(), [1], STOP)
    await call

    assert (await lines.ended())["resubmits"] == 1


async def test_text_is_logged_if_asked_for_and_cut(start_router: StartRouter, lines: Lines) -> None:
    client = await start_router(log_requests="text")
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="quick fox")])
    call = generate(client, pb.GenerateSpec(chat=chat))
    submit = await client.scheduler.accept()
    client.scheduler.send(submit, TOKENIZER.encode("x" * 2 * MAX_LOGGED_CHARACTERS).ids, LENGTH)
    await call

    logged = await lines.ended()

    assert logged["prompt"] == "user: quick fox\n"
    assert logged["outputs"] == ["x" * MAX_LOGGED_CHARACTERS]


async def test_strange_parameters_make_no_strange_json(start_router: StartRouter, lines: Lines) -> None:
    client = await start_router(log_requests="summary")
    sampling = SamplingParams(temperature=float("nan"), logit_bias={7: 1.0, 8: 2.0})
    with pytest.raises(grpc.aio.AioRpcError):
        await generate(client, spec(sampling=sampling))

    assert (await lines.ended())["sampling"] == {"temperature": "nan", "logit_bias": 2}


async def test_nothing_is_logged_by_default(client: Client, lines: Lines) -> None:
    call = generate(client, spec())
    client.scheduler.send(await client.scheduler.accept(), [1], STOP)
    await call

    assert lines.silent()


async def test_a_fault_is_logged_under_the_ids_of_its_request(
    client: Client, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("router.output.Output.add")
    trace = (("traceparent", f"00-{TRACE_ID}-00f067aa0ba902b7-00"),)
    call = generate(client, spec(request_id="mine"), metadata=trace)
    client.scheduler.send(await client.scheduler.accept(), [1], STOP)
    with pytest.raises(grpc.aio.AioRpcError):
        await call

    fault = await lines.of("router.errors")

    assert (fault["request_id"], fault["trace_id"]) == ("mine", TRACE_ID)


async def test_resubmits_are_events_of_the_span(start_router: StartRouter) -> None:
    with collecting() as collector:
        fakes = [FakeScheduler(), FakeScheduler()]
        client = await start_router(fakes, otlp_endpoint=collector.endpoint, trace_sample_ratio=1)
        first, second = fakes
        call = generate(client, spec())
        submit = await first.accept()
        first.drop()
        again = await second.accept()
        second.send(again, [1], STOP)
        await call

        (span,) = await asyncio.to_thread(collector.spans, 1)

    assert span.events == [("resubmit", {})]
    assert submit.trace_context == again.trace_context
    assert submit.trace_context.startswith(f"00-{span.trace_id}-{span.span_id}-")
    assert is_sampled(submit.trace_context)
    assert span.parent_id == ""


async def test_a_span_has_no_text_and_the_fault_of_a_server(start_router: StartRouter) -> None:
    with collecting() as collector:
        client = await start_router(otlp_endpoint=collector.endpoint, trace_sample_ratio=1)
        stop = pb.StopConditions(strings=["a secret"], max_tokens=3)
        call = generate(client, spec(text="a secret", stop=stop, sampling=SamplingParams(temperature=0.5)))
        await client.scheduler.refuse(grpc.StatusCode.INTERNAL, "a secret")
        with pytest.raises(grpc.aio.AioRpcError):
            await call

        (span,) = await asyncio.to_thread(collector.spans, 1)

    assert "secret" not in str(span)
    assert (span.failed, span.attributes["error.type"]) == (True, "INTERNAL")
    assert span.attributes["gen_ai.request.temperature"] == 0.5
    assert span.attributes["gen_ai.request.max_tokens"] == 3


async def test_a_router_without_traces_hands_on_what_its_client_sent(client: Client) -> None:
    sent = f"00-{TRACE_ID}-00f067aa0ba902b7-01"
    call = generate(client, spec(), metadata=(("traceparent", sent),))
    submit = await client.scheduler.accept()
    client.scheduler.send(submit, [1], STOP)
    await call

    assert submit.trace_context == sent
