"""Clients of the embedded model, through three real processes."""

import random
import threading
import time
import urllib.error
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from grpc_status import rpc_status

from pagoda.v1 import inference_pb2 as pb
from pagoda.v1.inference_pb2_grpc import InferenceServiceStub
from tests.e2e.client import Answer, spec, status
from tests.e2e.stack import PROCESSES, Stack, until

pytestmark = pytest.mark.e2e


@pytest.fixture
def stub(stack: Stack) -> Iterator[InferenceServiceStub]:
    with stack.channel() as channel:
        yield stack.stub(channel)


def chat(*messages: str) -> pb.GenerateSpec:
    request = spec(max_tokens=40)
    roles = ("user", "assistant")
    for index, content in enumerate(messages):
        request.chat.messages.add(role=roles[index % 2], content=content)
    return request


def test_the_model_answers_a_question(stub: InferenceServiceStub) -> None:
    response = stub.Generate(pb.GenerateRequest(spec=chat("What is the capital of France?")), timeout=60)

    output = response.outputs[0]
    assert "Paris" in output.text
    assert output.finish_reason == pb.FINISH_REASON_STOP
    assert response.usage.completion_tokens == len(output.token_ids)
    assert response.usage.prompt_tokens == response.accepted.prompt_tokens > 10


def test_a_stream_says_the_same_as_the_unary_call(stub: InferenceServiceStub) -> None:
    request = chat("Name three colours.")
    whole = stub.Generate(pb.GenerateRequest(spec=request), timeout=60)

    answer = Answer(stub, request)
    kinds = [event.WhichOneof("event") for event in answer.events()]

    assert kinds[0] == "accepted"
    assert kinds[-1] == "usage"
    assert kinds.count("delta") > 3
    assert answer.text == whole.outputs[0].text
    assert answer.token_ids == whole.outputs[0].token_ids
    assert answer.usage.completion_tokens == whole.usage.completion_tokens


def test_text_and_token_ids_are_one_prompt(stub: InferenceServiceStub) -> None:
    text = "The quick brown fox 🦊"
    ids = list(stub.Tokenize(pb.TokenizeRequest(text=text)).token_ids)

    assert stub.Detokenize(pb.DetokenizeRequest(token_ids=ids)).text == text
    assert Answer(stub, spec(ids)).finish().token_ids == Answer(stub, spec(text)).finish().token_ids


def test_a_stop_string_ends_the_text_before_it(stub: InferenceServiceStub) -> None:
    free = Answer(stub, spec("1, 2, 3, 4,", max_tokens=30)).finish()
    assert " 7, 8" in free.text

    stopped = Answer(stub, spec("1, 2, 3, 4,", max_tokens=30, strings=["7, 8"]))
    pieces = [event.delta.text for event in stopped.events()]

    assert "".join(pieces) == free.text[: free.text.index("7, 8")]
    assert stopped.finish_reason == pb.FINISH_REASON_STOP
    assert stopped.delta.stop_string == "7, 8"


def test_a_stop_token_ends_the_output(stub: InferenceServiceStub) -> None:
    free = Answer(stub, spec("1, 2, 3, 4,", max_tokens=30)).finish()
    token = free.token_ids[7]

    stopped = Answer(stub, spec("1, 2, 3, 4,", max_tokens=30, token_ids=[token])).finish()

    assert stopped.token_ids == free.token_ids[: free.token_ids.index(token) + 1]
    assert stopped.delta.stop_token_id == token


def test_a_seed_repeats_and_its_absence_does_not(stub: InferenceServiceStub) -> None:
    first = Answer(stub, spec(temperature=1.5)).finish()
    second = Answer(stub, spec(temperature=1.5)).finish()
    again = Answer(stub, spec(temperature=1.5, seed=first.accepted.seed)).finish()

    assert first.accepted.seed != second.accepted.seed
    assert first.token_ids != second.token_ids
    assert again.token_ids == first.token_ids


def test_logprobs_come_one_per_token(stub: InferenceServiceStub) -> None:
    request = spec(max_tokens=8)
    request.sampling.logprobs = 3

    output = stub.Generate(pb.GenerateRequest(spec=request)).outputs[0]

    assert [position.chosen.token_id for position in output.logprobs] == list(output.token_ids)
    for position in output.logprobs:
        assert len(position.top) == 3
        assert position.top[0] == position.chosen
        assert position.chosen.logprob < 0


def test_a_bias_and_min_tokens_keep_the_model_talking(stub: InferenceServiceStub) -> None:
    question = chat("What is the capital of France?")
    (free,) = stub.Generate(pb.GenerateRequest(spec=question), timeout=60).outputs
    assert free.finish_reason == pb.FINISH_REASON_STOP
    question.stop.min_tokens = 30
    question.sampling.logit_bias[free.token_ids[0]] = -100

    (output,) = stub.Generate(pb.GenerateRequest(spec=question), timeout=60).outputs

    assert len(free.token_ids) < 30 < len(output.token_ids)
    assert free.token_ids[0] not in output.token_ids


def test_prompt_logprobs_say_what_the_model_expected(stub: InferenceServiceStub) -> None:
    ids = list(stub.Tokenize(pb.TokenizeRequest(text="The capital of France is Paris")).token_ids)
    request = spec(ids, max_tokens=2)
    stub.Generate(pb.GenerateRequest(spec=request), timeout=60)
    request.prompt_logprobs = 3

    answer = Answer(stub, request)
    events = list(answer.events())

    kinds = [event.WhichOneof("event") for event in events]
    assert kinds[:3] == ["accepted", "prompt_logprobs", "delta"]
    assert kinds.count("prompt_logprobs") == 1
    first, *positions = events[1].prompt_logprobs.positions
    assert not first.HasField("chosen")
    assert [position.chosen.token_id for position in positions] == ids[1:]
    assert positions[-1].top[0] == positions[-1].chosen
    assert answer.usage.cached_tokens == 0


def test_several_outputs_of_one_prompt(stub: InferenceServiceStub) -> None:
    request = spec("Once upon a time", max_tokens=20, temperature=1.2, seed=4)
    request.n = 3

    response = stub.Generate(pb.GenerateRequest(spec=request), timeout=60)

    assert [output.index for output in response.outputs] == [0, 1, 2]
    assert len({output.text for output in response.outputs}) == 3
    assert response.usage.completion_tokens == sum(len(output.token_ids) for output in response.outputs)


def test_beams_come_best_first(stub: InferenceServiceStub) -> None:
    request = pb.GenerateSpec(
        text="The capital of France is",
        n=2,
        beam_search=pb.BeamSearch(beam_width=4),
        stop=pb.StopConditions(max_tokens=8),
    )

    outputs = stub.Generate(pb.GenerateRequest(spec=request), timeout=60).outputs

    assert outputs[0].text != outputs[1].text
    assert 0 > outputs[0].score >= outputs[1].score
    assert "Paris" in outputs[0].text


def test_a_prompt_that_was_there_before_is_found(stub: InferenceServiceStub) -> None:
    request = spec(list(range(1000, 1100)), max_tokens=2, ignore_eos=True)
    first = stub.Generate(pb.GenerateRequest(spec=request)).usage
    second = stub.Generate(pb.GenerateRequest(spec=request)).usage
    request.cache_salt = "another tenant"
    salted = stub.Generate(pb.GenerateRequest(spec=request)).usage

    assert (first.cached_tokens, second.cached_tokens, salted.cached_tokens) == (0, 96, 0)


def test_a_system_prompt_of_100_requests_is_computed_once(stack: Stack, stub: InferenceServiceStub) -> None:
    system = list(range(2000, 2512))
    before = stack.metric("scheduler", "pagoda_scheduler_step_tokens_total", kind="prefill")

    calls = [
        stub.Generate.future(pb.GenerateRequest(spec=spec([*system, number, 7], max_tokens=1)), timeout=120)
        for number in range(100, 200)
    ]
    cached = [call.result().usage.cached_tokens for call in calls]

    after = stack.metric("scheduler", "pagoda_scheduler_step_tokens_total", kind="prefill")
    assert sorted(cached) == [0] + [512] * 99
    assert after - before == 512 + 100 * 2


def test_64_streams_with_random_cancels_leave_every_block_free(stack: Stack) -> None:
    randomly = random.Random(1)
    ended: list[str] = []

    def client(number: int) -> None:
        with stack.channel() as channel:
            answer = Answer(
                stack.stub(channel),
                spec(f"Story number {number}:", max_tokens=30, temperature=1, ignore_eos=True),
            )
            cancel_after = randomly.randrange(20) if number % 2 else None
            try:
                for _ in answer.events():
                    if cancel_after is not None and len(answer.token_ids) > cancel_after:
                        answer.call.cancel()
            except grpc.RpcError as error:
                assert error.code() is grpc.StatusCode.CANCELLED  # noqa: PT017
                ended.append("cancelled")
            else:
                assert len(answer.token_ids) == 30
                ended.append("whole")

    threads = [threading.Thread(target=client, args=(number,)) for number in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert ended.count("whole") == 32
    assert ended.count("cancelled") == 32
    until(lambda: stack.used_blocks() == 0)
    assert stack.metric("scheduler", "pagoda_scheduler_running_sequences") == 0
    assert stack.metric("scheduler", "pagoda_scheduler_waiting_sequences") == 0


def test_a_cancelled_client_frees_its_blocks(stack: Stack, stub: InferenceServiceStub) -> None:
    answer = Answer(stub, spec(max_tokens=4000, ignore_eos=True)).read(3)
    assert stack.used_blocks() > 0

    answer.call.cancel()

    until(lambda: stack.used_blocks() == 0)


def test_a_deadline_ends_the_request_and_frees_its_blocks(stack: Stack, stub: InferenceServiceStub) -> None:
    answer = Answer(stub, spec(max_tokens=4000, ignore_eos=True), timeout=0.5)

    assert status(answer.finish)[0] is grpc.StatusCode.DEADLINE_EXCEEDED
    assert answer.token_ids
    until(lambda: stack.used_blocks() == 0)


def changed(**fields: Any) -> pb.GenerateSpec:
    request = spec()
    request.MergeFrom(pb.GenerateSpec(**fields))
    return request


@pytest.mark.parametrize(
    ("request_spec", "field", "text"),
    [
        (spec(""), "spec.text", "tokens"),
        (spec([]), "spec.token_ids.ids", "empty"),
        (pb.GenerateSpec(), "spec.prompt", "missing"),
        (spec([7, 49152]), "spec.token_ids.ids[1]", "49152"),
        (spec([1] * 9000), "spec.token_ids.ids", "8192"),
        (spec("word " * 9000), "spec.text", "8192"),
        (spec("a" * 10_000_000), "spec.text", "10000000 bytes"),
        (spec(temperature=float("nan")), "spec.sampling.temperature", "nan"),
        (spec(temperature=-1), "spec.sampling.temperature", "-1"),
        (spec(max_tokens=0), "spec.stop.max_tokens", "0"),
        (spec(max_tokens=8192), "spec.stop.max_tokens", "8192"),
        (changed(request_id="a\nb"), "spec.request_id", "printable"),
        (changed(n=65), "spec.n", "65 is above max_num_seqs, which is 64"),
    ],
)
def test_bad_input_is_named_with_its_limit(
    stub: InferenceServiceStub, request_spec: pb.GenerateSpec, field: str, text: str
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        stub.Generate(pb.GenerateRequest(spec=request_spec))

    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    rich = rpc_status.from_call(caught.value)  # type: ignore[arg-type]
    violations = [
        violation
        for detail in rich.details
        if detail.Is(error_details_pb2.BadRequest.DESCRIPTOR)
        for violation in error_details_pb2.BadRequest.FromString(detail.value).field_violations
    ]
    assert [violation.field for violation in violations] == [field]
    assert text in violations[0].description


def test_another_model_is_not_found(stub: InferenceServiceStub) -> None:
    code, message = status(lambda: stub.Generate(pb.GenerateRequest(spec=changed(model="gpt-4"))))

    assert code is grpc.StatusCode.NOT_FOUND
    assert "SmolLM2-135M-Instruct" in message


@pytest.mark.parametrize(
    "body", [b"\xff\xff\xff\xff", b"\x0a\x05\x1a\x03\xff\xfe\xfd"], ids=["broken", "invalid UTF-8"]
)
def test_broken_bytes_are_an_invalid_argument(stack: Stack, body: bytes) -> None:
    with stack.channel() as channel:
        call = channel.unary_unary("/pagoda.v1.InferenceService/Generate", bytes, bytes)
        code, message = status(lambda: call(body))

    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "GenerateRequest" in message


def test_the_model_is_described(stub: InferenceServiceStub) -> None:
    model = stub.GetModel(pb.GetModelRequest())

    assert (model.name, model.max_model_len, model.vocab_size) == ("SmolLM2-135M-Instruct", 8192, 49152)
    assert model.chat
    assert model.dtype == "bfloat16"
    assert list(model.eos_token_ids) == [2]
    assert len(model.revision) == 64


def test_health_and_reflection_are_served(stack: Stack) -> None:
    with stack.channel() as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", "pagoda.v1.InferenceService"):
            response = health.Check(health_pb2.HealthCheckRequest(service=name))
            assert response.status == health_pb2.HealthCheckResponse.SERVING
        services = ProtoReflectionDescriptorDatabase(channel).get_services()

    assert {"pagoda.v1.InferenceService", "grpc.health.v1.Health"} <= set(services)


@pytest.mark.parametrize("process", PROCESSES)
def test_each_process_answers_probes_and_metrics(stack: Stack, process: str) -> None:
    for probe in ("/startupz", "/livez", "/readyz"):
        assert stack.get(process, probe) == "ok\n"
    with pytest.raises(urllib.error.HTTPError, match="404"):
        stack.get(process, "/nothing")
    assert f"\npagoda_{process}_" in stack.get(process, "/metrics")


def test_metrics_count_what_was_served(stack: Stack, stub: InferenceServiceStub) -> None:
    def tokens() -> tuple[float, float, float]:
        return (
            stack.metric("router", "pagoda_router_output_tokens_total"),
            stack.metric("scheduler", "pagoda_scheduler_step_tokens_total", kind="prefill"),
            stack.metric("router", "pagoda_router_time_to_first_token_seconds_count"),
        )

    before = tokens()
    answer = Answer(stub, spec(max_tokens=20, ignore_eos=True)).finish()
    after = tokens()

    assert after[0] - before[0] == 20
    assert after[1] - before[1] == answer.usage.prompt_tokens
    assert after[2] - before[2] == 1


def test_a_client_that_does_not_read_holds_nobody_up(stack: Stack, stub: InferenceServiceStub) -> None:
    with stack.channel() as channel:
        idle = Answer(stack.stub(channel), spec(max_tokens=2000, ignore_eos=True))
        started = time.monotonic()
        assert len(Answer(stub, spec(max_tokens=10, ignore_eos=True)).finish().token_ids) == 10
        assert time.monotonic() - started < 60
        idle.call.cancel()
    until(lambda: stack.used_blocks() == 0)
