"""The public service over a real channel, against a scheduler that the test scripts."""

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import code_pb2, error_details_pb2
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from common.rpc import AddressError
from pagoda.v1 import inference_pb2 as pb
from pagoda.v1.sampling_pb2 import PositionLogprobs, SamplingParams, TokenLogprob
from router import metrics
from tests.router.conftest import Client, StartRouter
from tests.router.fake_scheduler import LENGTH, STOP, FakeScheduler
from tests.router.models import byte_level_bpe, write_model

TOKENIZER = byte_level_bpe()
EOS = 1
EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text).ids


def spec(text: str = "fox", **fields: Any) -> pb.GenerateSpec:
    return pb.GenerateSpec(text=text, **fields)


def stops(*strings: str, **fields: Any) -> pb.StopConditions:
    return pb.StopConditions(strings=strings, **fields)


def stream(client: Client, spec: pb.GenerateSpec, **call: Any) -> Any:
    return client.stub.GenerateStream(pb.GenerateStreamRequest(spec=spec), **call)


def generate(client: Client, spec: pb.GenerateSpec, **call: Any) -> Any:
    return client.stub.Generate(pb.GenerateRequest(spec=spec), **call)


class Received:
    """A whole stream, put together."""

    def __init__(self, messages: list[pb.GenerateStreamResponse]) -> None:
        kinds = [message.WhichOneof("event") for message in messages]
        assert kinds == ["accepted", *["delta"] * (len(kinds) - 2), "usage"]
        self.accepted = messages[0].accepted
        self.deltas = [message.delta for message in messages[1:-1]]
        self.usage = messages[-1].usage
        self.text = "".join(delta.text for delta in self.deltas)
        self.token_ids = [token_id for delta in self.deltas for token_id in delta.token_ids]


async def receive(call: Any) -> Received:
    return Received([message async for message in call])


async def error_of(call: Awaitable[Any]) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


def detail(error: grpc.aio.AioRpcError, kind: Any) -> Any:
    status: Any = rpc_status.from_call(error)  # type: ignore[arg-type]
    for packed in status.details:
        message = kind()
        if packed.Unpack(message):
            return message
    raise AssertionError(f"no {kind} in {status}")


async def test_a_stream_is_accepted_then_deltas_then_usage(client: Client) -> None:
    call = stream(client, spec("quick fox", request_id="mine", sampling=SamplingParams(seed=7)))
    submit = await client.scheduler.accept()
    accepted = (await call.read()).accepted
    answer = ids("nothing 你好")
    for token_id in answer:
        client.scheduler.send(submit, [token_id], cached_tokens=2)
    client.scheduler.send(submit, [EOS], STOP)
    rest = await receive_rest(call, accepted)

    assert (accepted.request_id, accepted.seed, accepted.model) == ("mine", 7, "tiny")
    assert (accepted.model_revision, accepted.prompt_tokens) == ("r1", len(ids("quick fox")))
    assert list(submit.prompt_token_ids) == ids("quick fox")
    assert list(submit.stop_token_ids) == [EOS]
    assert rest.text == "nothing 你好"
    assert rest.token_ids == [*answer, EOS]
    assert (rest.deltas[-1].finish_reason, rest.deltas[-1].stop_token_id) == (STOP, EOS)
    assert rest.usage == pb.Usage(
        prompt_tokens=len(ids("quick fox")), completion_tokens=len(answer) + 1, cached_tokens=2
    )


async def receive_rest(call: Any, accepted: pb.Accepted) -> Received:
    messages = [pb.GenerateStreamResponse(accepted=accepted)]
    while (message := await call.read()) is not EOF:
        messages.append(message)
    return Received(messages)


async def test_nothing_comes_before_the_scheduler_accepted(client: Client) -> None:
    call = stream(client, spec())
    submit = await client.scheduler.submits.get()
    read = asyncio.ensure_future(call.read())
    # Answered by the same router, so a message to `call` would have been there before.
    await client.stub.GetModel(pb.GetModelRequest())
    assert not read.done()
    client.scheduler.refuse_key(submit, grpc.StatusCode.INVALID_ARGUMENT, "never fits")
    assert (await error_of(read)).code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_unary_gives_the_whole_at_once(client: Client) -> None:
    call = generate(client, spec(sampling=SamplingParams(logprobs=0)))
    submit = await client.scheduler.accept()
    answer = ids("lazy dog")
    for token_id in answer:
        position = PositionLogprobs(chosen=TokenLogprob(token_id=token_id, logprob=-1))
        finish = LENGTH if token_id == answer[-1] else 0
        client.scheduler.send(submit, [token_id], finish, logprobs=[position])  # type: ignore[arg-type]
    response = await call
    (output,) = response.outputs
    assert (output.text, list(output.token_ids)) == ("lazy dog", answer)
    assert [position.chosen.token_id for position in output.logprobs] == answer
    assert output.finish_reason == LENGTH
    assert response.accepted.model_revision == "r1"
    assert response.usage.completion_tokens == len(answer)


async def test_chat_goes_through_the_template(client: Client) -> None:
    messages = [pb.ChatMessage(role="user", content="hi")]
    call = generate(client, pb.GenerateSpec(chat=pb.Chat(messages=messages)))
    submit = await client.scheduler.accept()
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert list(submit.prompt_token_ids) == ids(prompt)
    client.scheduler.send(submit, [EOS], STOP)
    await call


async def test_stop_string_across_tokens_ends_the_output_and_aborts(client: Client) -> None:
    call = stream(client, spec(stop=stops("wasted", "zzz")))
    submit = await client.scheduler.accept()
    answer = ids("nothing is wasted. More")
    for token_id in answer:
        client.scheduler.send(submit, [token_id])
    received = await receive(call)
    abort = await client.scheduler.aborts.get()

    assert abort.key == submit.key
    assert not abort.HasField("output_index")
    assert received.text == "nothing is "
    assert all(not "wasted".startswith(delta.text[-1:] or "x") for delta in received.deltas[:-1])
    assert (received.deltas[-1].finish_reason, received.deltas[-1].stop_string) == (STOP, "wasted")
    kept = received.token_ids
    assert kept == answer[: len(kept)]
    assert "wasted" in TOKENIZER.decode(kept)
    assert "wasted" not in TOKENIZER.decode(kept[:-1])
    assert received.usage.completion_tokens == len(kept)


async def test_stop_string_can_be_kept(client: Client) -> None:
    call = generate(client, spec(stop=stops("is", include_stop_string=True)))
    client.scheduler.send(await client.scheduler.accept(), ids("nothing is wasted"))
    assert (await call).outputs[0].text == "nothing is"


async def test_logprobs_stay_aligned_when_a_stop_string_cuts(client: Client) -> None:
    call = generate(client, spec(stop=stops("is"), sampling=SamplingParams(logprobs=0)))
    answer = ids("nothing is wasted")
    positions = [PositionLogprobs(chosen=TokenLogprob(token_id=token_id)) for token_id in answer]
    client.scheduler.send(await client.scheduler.accept(), answer, logprobs=positions)
    (output,) = (await call).outputs
    assert [position.chosen.token_id for position in output.logprobs] == list(output.token_ids)
    assert len(output.token_ids) < len(answer)


def position(token_id: int) -> PositionLogprobs:
    return PositionLogprobs(chosen=TokenLogprob(token_id=token_id, logprob=-1))


async def test_prompt_logprobs_come_once_and_whole_before_the_first_delta(client: Client) -> None:
    call = stream(client, spec("quick fox", n=2, prompt_logprobs=0))
    submit = await client.scheduler.accept(number=9)
    prompt = list(submit.prompt_token_ids)
    # The tokens of another output may overtake the last of them.
    client.scheduler.send(submit, [], prompt_logprobs=[position(prompt[1])])
    client.scheduler.send_plain(9, 1, ids("fox"))
    client.scheduler.send(submit, ids("fox"), LENGTH, prompt_logprobs=[position(i) for i in prompt[2:]])
    client.scheduler.send(submit, [EOS], STOP, output_index=1)
    events = [event async for event in call]

    kinds = [event.WhichOneof("event") for event in events]
    assert kinds == ["accepted", "prompt_logprobs", *["delta"] * (len(kinds) - 3), "usage"]
    positions = events[1].prompt_logprobs.positions
    assert positions[0] == PositionLogprobs()
    assert [p.chosen.token_id for p in positions[1:]] == prompt[1:]


async def test_prompt_logprobs_are_asked_for_anew_until_they_are_whole(client: Client) -> None:
    call = generate(client, spec("quick fox", prompt_logprobs=2))
    first = await client.scheduler.accept()
    prompt = list(first.prompt_token_ids)
    whole = [position(token_id) for token_id in prompt[1:]]
    client.scheduler.send(first, [], prompt_logprobs=whole[:1])
    client.scheduler.drop()
    second = await client.scheduler.accept()
    client.scheduler.send(second, ids("fox")[:1], prompt_logprobs=whole)
    client.scheduler.drop()
    third = await client.scheduler.accept()
    client.scheduler.send(third, [EOS], STOP)

    assert list((await call).prompt_logprobs.positions) == [PositionLogprobs(), *whole]
    assert [one.prompt_logprobs for one in (first, second)] == [2, 2]
    assert not third.HasField("prompt_logprobs")


async def test_cancel_frees_at_once(client: Client) -> None:
    call = stream(client, spec())
    submit = await client.scheduler.accept()
    await call.read()
    call.cancel()
    assert (await client.scheduler.aborts.get()).key == submit.key
    await client.router.inference.calls.wait_idle()


async def test_cancel_before_acceptance_frees_too(client: Client) -> None:
    call = generate(client, spec())
    submit = await client.scheduler.submits.get()
    call.cancel()
    assert (await client.scheduler.aborts.get()).key == submit.key


async def test_deadline_travels_and_ends_the_request(client: Client) -> None:
    call = stream(client, spec(), timeout=0.5)
    submit = await client.scheduler.accept()
    error = await error_of(receive(call))
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert 0 < submit.deadline_remaining.ToMilliseconds() <= 500
    assert (await client.scheduler.aborts.get()).key == submit.key


async def test_no_deadline_is_none(client: Client) -> None:
    call = generate(client, spec())
    submit = await client.scheduler.accept()
    assert not submit.HasField("deadline_remaining")
    client.scheduler.send(submit, [EOS], STOP)
    await call


async def test_trace_context_travels_and_nonsense_does_not(client: Client) -> None:
    good = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    for given, expected in ((good, good), ("x" * 5000, "")):
        call = generate(client, spec(), metadata=(("traceparent", given),))
        submit = await client.scheduler.accept()
        assert submit.trace_context == expected
        client.scheduler.send(submit, [EOS], STOP)
        await call


async def flood(client: Client, submit: Any, steps: int) -> list[int]:
    """Sends far more than flow control lets through to a client that doesn't read."""
    position = PositionLogprobs(top=[TokenLogprob(token_id=300, logprob=-1)] * 20)
    sent = [300 + step % 64 for step in range(steps)]
    for token_id in sent:
        client.scheduler.send(submit, [token_id], logprobs=[position] * 50)
    return sent


async def test_a_slow_reader_gets_merged_deltas_and_loses_nothing(start_router: StartRouter) -> None:
    client = await start_router(channel_options=[("grpc.http2.bdp_probe", 0)])
    call = stream(client, spec())
    submit = await client.scheduler.accept()
    sent = await flood(client, submit, 400)
    client.scheduler.send(submit, [EOS], STOP)
    # Behind all of these on the same stream: when it is done, the router has received them.
    other = generate(client, spec("dog"))
    client.scheduler.send(await client.scheduler.accept(), [EOS], STOP)
    await other
    received = await receive(call)
    assert received.token_ids == [*sent, EOS]
    assert len(received.deltas) < 300


async def test_a_client_that_never_reads_is_ended(start_router: StartRouter) -> None:
    client = await start_router(write_stall_timeout=0.2, channel_options=[("grpc.http2.bdp_probe", 0)])
    call = stream(client, spec())
    submit = await client.scheduler.accept()
    await flood(client, submit, 400)
    assert (await client.scheduler.aborts.get()).key == submit.key
    await client.router.inference.calls.wait_idle()
    error = await error_of(receive(call))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "took nothing for 0.2 s" in (error.details() or "")


async def test_a_dropped_stream_gives_one_continuous_output(client: Client) -> None:
    call = stream(client, spec(sampling=SamplingParams(seed=3)), timeout=30)
    first = await client.scheduler.accept()
    answer = ids("Paged attention 🙂 keeps keys")
    half = TOKENIZER.encode("Paged attention ").ids
    cut = len(half) + 2  # within the emoji's bytes
    client.scheduler.send(first, answer[:cut])
    client.scheduler.drop()
    second = await client.scheduler.accept()
    for token_id in answer[cut:]:
        client.scheduler.send(second, [token_id])
    client.scheduler.send(second, [EOS], STOP)
    received = await receive(call)

    assert received.token_ids == [*answer, EOS]
    assert received.text == "Paged attention 🙂 keeps keys"
    assert received.usage.completion_tokens == len(answer) + 1
    assert second.key.request_id == first.key.request_id
    assert second.key.attempt > first.key.attempt
    assert list(second.prior_outputs) == [pb.PriorOutput(index=0, token_ids=answer[:cut])]
    assert second.sampling == first.sampling
    assert second.model_revision == "r1"
    assert second.age.ToNanoseconds() > first.age.ToNanoseconds()
    assert second.deadline_remaining.ToNanoseconds() < first.deadline_remaining.ToNanoseconds()


async def test_an_accepted_request_is_marked_as_such_before_its_first_token(client: Client) -> None:
    call = generate(client, spec())
    await client.scheduler.accept()
    client.scheduler.drop()
    second = await client.scheduler.accept()
    assert list(second.prior_outputs) == [pb.PriorOutput()]
    client.scheduler.send(second, [EOS], STOP)
    await call


async def test_late_tokens_of_a_lost_attempt_are_ignored(client: Client) -> None:
    call = generate(client, spec())
    first = await client.scheduler.accept()
    client.scheduler.drop()
    second = await client.scheduler.accept()
    client.scheduler.send(first, ids("zebra"), STOP)
    client.scheduler.send(second, ids("fox"), LENGTH)
    assert (await call).outputs[0].text == "fox"


async def test_another_replica_takes_over(start_router: StartRouter) -> None:
    client = await start_router([FakeScheduler(), FakeScheduler()])
    call = stream(client, spec())
    here, there = await pick(client)
    here.send(await here.accept(), ids("quick "))
    accepted, first = (await call.read()).accepted, await call.read()
    await here.stop()
    there.send(await there.accept(), ids("fox"), LENGTH)
    assert first.delta.text + (await receive_rest(call, accepted)).text == "quick fox"


async def pick(client: Client) -> tuple[FakeScheduler, FakeScheduler]:
    """The fake that gets the next submit, which stays in its queue, and the other one."""
    a, b = client.schedulers
    waits = {asyncio.ensure_future(fake.submits.get()): fake for fake in (a, b)}
    done, rest = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for task in rest:
        task.cancel()
    (task,) = done
    chosen = waits[task]
    chosen.submits.put_nowait(task.result())
    return chosen, b if chosen is a else a


async def test_another_model_revision_is_not_taken(client: Client) -> None:
    call = generate(client, spec())
    await client.scheduler.accept()
    client.scheduler.welcome.model_revision = "r2"
    client.scheduler.drop()
    error = await error_of(call)
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "'r1' and 'r2' is served" in (error.details() or "")


async def test_a_client_is_not_resumed_on_another_model(client: Client) -> None:
    error = await error_of(generate(client, spec(model_revision="r0")))

    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert client.scheduler.submits.empty()


@pytest.fixture
async def two(start_router: StartRouter) -> Client:
    """Two replicas of one model, perhaps with unlike pools."""
    return await start_router([FakeScheduler(), FakeScheduler()])


TOO_LARGE = (grpc.StatusCode.INVALID_ARGUMENT, "the KV pool holds 64 tokens")


async def test_what_is_too_large_for_one_replica_is_asked_of_the_others(two: Client) -> None:
    call = generate(two, spec())
    small, large = await pick(two)
    await small.refuse(*TOO_LARGE, field="spec.stop.max_tokens")

    large.send(await large.accept(), ids("fox"), LENGTH)

    assert (await call).outputs[0].text == "fox"


async def test_what_is_too_large_for_all_replicas_is_invalid(two: Client) -> None:
    call = generate(two, spec())
    for fake in await pick(two):
        await fake.refuse(*TOO_LARGE, field="spec.stop.max_tokens")

    error = await error_of(call)

    assert (error.code(), error.details()) == (TOO_LARGE[0], f"spec.stop.max_tokens: {TOO_LARGE[1]}")


async def test_a_request_that_fits_only_a_full_replica_is_overload(two: Client) -> None:
    call = generate(two, spec())
    full, small = await pick(two)
    await full.refuse(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
    await small.refuse(*TOO_LARGE, field="spec.stop.max_tokens")

    assert (await error_of(call)).code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_constraint_that_one_replica_finds_invalid_is_asked_of_no_other(two: Client) -> None:
    call = generate(two, spec())
    one, other = await pick(two)
    await one.refuse(grpc.StatusCode.INVALID_ARGUMENT, "not a schema", field="spec.constraint")

    assert (await error_of(call)).code() is grpc.StatusCode.INVALID_ARGUMENT
    assert other.submits.empty()


async def test_a_request_too_large_for_what_is_left_waits_for_its_replica(two: Client) -> None:
    call = generate(two, spec())
    large, small = await pick(two)
    large.send(await large.accept(), ids("fox")[:1])

    large.drop()
    # It may be back before it is asked of the other.
    asked, _ = await pick(two)
    if asked is small:
        await small.refuse(*TOO_LARGE, field="spec.stop.max_tokens")
    again = await large.accept()
    large.send(again, [EOS], STOP)

    assert list((await call).outputs[0].token_ids) == [ids("fox")[0], EOS]


@pytest.fixture
async def two_models(start_router: StartRouter) -> Client:
    """Of two replicas, as in an update: the first serves r1, the other r2."""
    return await start_router([FakeScheduler(), FakeScheduler(model_revision="r2")])


async def test_a_busy_replica_is_overload_though_another_serves_another_model(two_models: Client) -> None:
    call = generate(two_models, spec(model_revision="r1"))
    await two_models.scheduler.refuse(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")

    error = await error_of(call)

    assert (error.code(), error.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "full")


async def test_a_request_waits_for_the_one_replica_of_its_model_to_come_back(two_models: Client) -> None:
    call = generate(two_models, spec(model_revision="r1"))
    await two_models.scheduler.accept()

    two_models.scheduler.drop()

    again = await two_models.scheduler.accept()
    two_models.scheduler.send(again, ids("fox"), LENGTH)
    assert (await call).outputs[0].text == "fox"


async def test_a_new_request_for_a_model_that_is_away_may_be_tried_again(two_models: Client) -> None:
    await two_models.scheduler.stop()
    while len(two_models.router.replicas.connected) == 2:
        await two_models.router.replicas.wait_change()

    error = await error_of(generate(two_models, spec(model_revision="r1")))

    message = "no scheduler is connected that serves model revision 'r1'"
    assert (error.code(), error.details()) == (grpc.StatusCode.UNAVAILABLE, message)


async def test_a_scheduler_that_stays_away_is_unavailable_in_the_end(start_router: StartRouter) -> None:
    client = await start_router(reconnect_timeout=0.2)
    call = generate(client, spec())
    await client.scheduler.accept()
    await client.scheduler.stop()
    error = await error_of(call)
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert detail(error, error_details_pb2.RetryInfo).retry_delay.ToMilliseconds() > 0


async def test_no_replica_is_unavailable_with_a_hint(start_router: StartRouter) -> None:
    client = await start_router()
    await client.wait_health(health_pb2.HealthCheckResponse.SERVING)
    await client.scheduler.stop()
    await client.wait_health(health_pb2.HealthCheckResponse.NOT_SERVING)
    error = await error_of(generate(client, spec()))
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert detail(error, error_details_pb2.RetryInfo).retry_delay.ToMilliseconds() > 0


async def test_a_refusal_keeps_its_code_and_details(client: Client) -> None:
    call = generate(client, spec())
    await client.scheduler.refuse(
        grpc.StatusCode.INVALID_ARGUMENT, "needs 9 blocks of 8", field="spec.stop.max_tokens"
    )
    error = await error_of(call)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    violation = detail(error, error_details_pb2.BadRequest).field_violations[0]
    assert (violation.field, violation.description) == ("spec.stop.max_tokens", "needs 9 blocks of 8")


async def test_a_full_replica_is_passed_over_for_another(start_router: StartRouter) -> None:
    client = await start_router([FakeScheduler(), FakeScheduler()])
    call = generate(client, spec())
    here, there = await pick(client)
    await here.refuse(grpc.StatusCode.RESOURCE_EXHAUSTED, "queue is full")
    there.send(await there.accept(), ids("fox"), LENGTH)
    assert (await call).outputs[0].text == "fox"


async def test_all_replicas_full_is_resource_exhausted_with_a_hint(client: Client) -> None:
    call = generate(client, spec())
    await client.scheduler.refuse(
        grpc.StatusCode.RESOURCE_EXHAUSTED, "queue is full", retry_delay=Duration(seconds=3)
    )
    error = await error_of(call)
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert detail(error, error_details_pb2.RetryInfo).retry_delay.seconds == 3


async def test_a_refusal_that_may_pass_has_a_hint_of_its_own(client: Client) -> None:
    call = generate(client, spec())
    await client.scheduler.refuse(grpc.StatusCode.RESOURCE_EXHAUSTED, "queue is full")
    assert detail(await error_of(call), error_details_pb2.RetryInfo).retry_delay.seconds == 1


async def test_an_output_that_was_not_asked_for_harms_nothing(client: Client) -> None:
    call = generate(client, spec(), timeout=10)
    submit = await client.scheduler.accept()
    client.scheduler.send(submit, ids("zebra"), LENGTH, output_index=7)
    client.scheduler.send(submit, ids("fox"), LENGTH)
    assert (await call).outputs[0].text == "fox"


async def test_the_replica_with_fewer_outstanding_tokens_is_chosen(start_router: StartRouter) -> None:
    client = await start_router([FakeScheduler(), FakeScheduler()])
    calls = [generate(client, spec())]
    busy, idle = await pick(client)
    submit = await busy.accept()
    busy.send(submit, ids("fox"), LENGTH, outstanding_tokens=1000)
    await calls[0]
    for _ in range(3):
        call = generate(client, spec())
        idle.send(await idle.accept(), ids("dog"), LENGTH)
        assert (await call).outputs[0].text == "dog"


async def test_a_draining_replica_gets_nothing_new_and_finishes_what_it_has(
    start_router: StartRouter,
) -> None:
    client = await start_router([FakeScheduler(), FakeScheduler()])
    running = generate(client, spec())
    here, there = await pick(client)
    submit = await here.accept()
    here.drain()
    await client.router.replicas.wait_change()
    for _ in range(2):
        call = generate(client, spec())
        there.send(await there.accept(), [EOS], STOP, outstanding_tokens=100_000)
        await call
    here.send(submit, ids("fox"), LENGTH)
    assert (await running).outputs[0].text == "fox"


async def test_a_request_that_a_draining_scheduler_hands_back_goes_on_elsewhere(
    start_router: StartRouter,
) -> None:
    client = await start_router([FakeScheduler(), FakeScheduler()])
    call = generate(client, spec())
    here, there = await pick(client)
    submit = await here.accept()
    here.send(submit, ids("quick "))
    here.refuse_key(submit, grpc.StatusCode.UNAVAILABLE, "shutting down")
    there.send(await there.accept(), ids("fox"), LENGTH)
    assert (await call).outputs[0].text == "quick fox"


async def test_equal_request_ids_do_not_mix(client: Client) -> None:
    calls = [generate(client, spec(request_id="same")) for _ in range(2)]
    submits = [await client.scheduler.accept() for _ in calls]
    assert submits[0].key != submits[1].key
    client.scheduler.send(submits[0], ids("fox"), LENGTH)
    client.scheduler.send(submits[1], ids("dog"), LENGTH)
    texts = {(await call).outputs[0].text for call in calls}
    assert texts == {"fox", "dog"}


async def test_plain_tokens_find_their_output_by_number(client: Client) -> None:
    call = generate(client, spec(n=2))
    submit = await client.scheduler.accept(number=77)
    client.scheduler.send_plain(78, 0, ids("dog"))
    client.scheduler.send_plain(77, 1, ids("quick "))
    client.scheduler.send_plain(77, 0, ids("nothing "))
    client.scheduler.send(submit, ids("is wasted"), LENGTH, output_index=0)
    client.scheduler.send(submit, ids("fox"), LENGTH, output_index=1)

    outputs = (await call).outputs

    assert [output.text for output in outputs] == ["nothing is wasted", "quick fox"]


async def test_several_outputs_are_streamed_apart(client: Client) -> None:
    call = generate(client, spec(n=2, stop=stops("wasted")))
    submit = await client.scheduler.accept()
    assert submit.n == 2
    client.scheduler.send(submit, ids("quick"), output_index=1)
    client.scheduler.send(submit, ids("nothing is wasted, "), output_index=0)
    abort = (await client.scheduler.aborts.get()).output_index
    client.scheduler.send(submit, ids(" fox"), LENGTH, output_index=1)

    response = await call

    assert abort == 0
    assert [output.index for output in response.outputs] == [0, 1]
    assert [output.text for output in response.outputs] == ["nothing is ", "quick fox"]
    assert response.usage.completion_tokens == sum(len(output.token_ids) for output in response.outputs)


async def test_beams_come_with_their_scores(client: Client) -> None:
    search = pb.BeamSearch(beam_width=3)
    call = generate(client, spec(n=2, beam_search=search))
    submit = await client.scheduler.accept()
    assert submit.beam_search == pb.BeamSearch(beam_width=3, length_penalty=1, early_stopping=False)
    for index, score in enumerate([-0.5, -0.75]):
        client.scheduler.send(submit, ids("fox"), LENGTH, output_index=index, score=score)

    outputs = (await call).outputs

    assert [output.score for output in outputs] == [-0.5, -0.75]
    assert [output.text for output in outputs] == ["fox", "fox"]


async def test_a_beam_search_begins_anew_after_a_lost_scheduler(client: Client) -> None:
    call = generate(client, spec(n=2, beam_search=pb.BeamSearch(beam_width=3)))
    await client.scheduler.accept()
    client.scheduler.drop()

    submit = await client.scheduler.accept()

    # Marked as accepted before, with nothing to go on from.
    assert list(submit.prior_outputs) == [pb.PriorOutput(), pb.PriorOutput(index=1)]
    assert submit.beam_search.beam_width == 3
    for index in range(2):
        client.scheduler.send(submit, ids("fox"), LENGTH, output_index=index, score=-1 - index)
    response = await call
    assert [output.text for output in response.outputs] == ["fox", "fox"]
    assert response.usage.completion_tokens == 2 * len(ids("fox"))


async def test_a_client_resumes_with_what_it_holds(client: Client) -> None:
    answer = ids("nothing 🙂 is wasted, lazy")
    cut = len(ids("nothing ")) + 1  # within the emoji's bytes
    prior = pb.PriorOutput(token_ids=answer[:cut])
    sampling = SamplingParams(seed=5)
    call = stream(client, spec(sampling=sampling, prior_outputs=[prior], stop=stops("wasted")))
    submit = await client.scheduler.accept()
    assert list(submit.prior_outputs) == [prior]
    client.scheduler.send(submit, answer[cut:])
    received = await receive(call)
    assert received.text == "🙂 is "
    assert TOKENIZER.decode(answer[:cut] + received.token_ids).endswith("wasted")
    assert received.usage.completion_tokens == cut + len(received.token_ids)


async def test_a_finished_output_needs_no_scheduler(client: Client) -> None:
    prior = pb.PriorOutput(token_ids=[5, EOS], finished=True)
    call = stream(client, spec(sampling=SamplingParams(seed=5), prior_outputs=[prior]))
    received = await receive(call)
    assert received.deltas == []
    assert received.usage.completion_tokens == 2
    assert client.scheduler.submits.empty()


async def test_a_prior_output_that_a_stop_string_ended_is_refused(client: Client) -> None:
    prior = pb.PriorOutput(token_ids=ids("nothing"))
    error = await error_of(
        generate(client, spec(sampling=SamplingParams(seed=1), prior_outputs=[prior], stop=stops("thin")))
    )
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "set finished" in (error.details() or "")


@pytest.mark.parametrize(
    "data",
    [b"\xff\xff\xff", b"\x0a\x06\x1a\x04\xff\xfe\xfd\xfc"],
    ids=["broken protobuf", "invalid UTF-8 in spec.text"],
)
@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
async def test_bad_bytes_are_invalid_argument(client: Client, method: str, data: bytes) -> None:
    make: Any = client.channel.unary_stream if method == "GenerateStream" else client.channel.unary_unary
    call = make(f"/pagoda.v1.InferenceService/{method}")(data)
    error = await error_of(call.read() if method == "GenerateStream" else call)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert detail(error, error_details_pb2.ErrorInfo).reason == "BROKEN_MESSAGE"


async def test_a_huge_prompt_is_refused_and_harms_nothing(client: Client) -> None:
    error = await error_of(generate(client, spec("x" * 10_000_000)))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "10000000 bytes, at most 1048576" in (error.details() or "")
    assert (await client.stub.Tokenize(pb.TokenizeRequest(text="fox"))).token_ids == ids("fox")


async def test_validation_errors_reach_the_client_with_details(client: Client) -> None:
    error = await error_of(generate(client, spec(sampling=SamplingParams(temperature=-1))))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    violation = detail(error, error_details_pb2.BadRequest).field_violations[0]
    assert violation.field == "spec.sampling.temperature"
    assert detail(error, error_details_pb2.ErrorInfo).domain == "pagoda"


async def test_too_many_requests_are_refused_with_a_hint(start_router: StartRouter) -> None:
    client = await start_router(max_concurrent_requests=1)
    running = generate(client, spec())
    submit = await client.scheduler.accept()
    error = await error_of(generate(client, spec()))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert detail(error, error_details_pb2.RetryInfo).retry_delay.seconds == 1
    client.scheduler.send(submit, ids("fox"), LENGTH)
    assert (await running).outputs[0].text == "fox"


async def test_surprises_are_internal_and_tell_the_client_nothing(
    client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def explode(*_: object) -> None:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr("router.inference.Output", explode)
    error = await error_of(generate(client, spec(request_id="mine")))
    assert error.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in (error.details() or "")
    (record,) = [record for record in caplog.records if "incident" in record.message]
    assert "secret" in caplog.text
    assert record.message.rpartition(" ")[2] in (error.details() or "")


async def test_get_model_says_what_the_scheduler_serves(client: Client) -> None:
    assert await client.stub.GetModel(pb.GetModelRequest()) == pb.GetModelResponse(
        name="tiny",
        revision="r1",
        max_model_len=512,
        vocab_size=420,
        eos_token_ids=[EOS],
        chat=True,
        dtype="float32",
        tool_call_format="hermes",
    )


async def test_tokenize_and_detokenize(client: Client) -> None:
    text = "naïve café 🙂"
    tokens = (await client.stub.Tokenize(pb.TokenizeRequest(text=text))).token_ids
    assert tokens == ids(text)
    request = pb.DetokenizeRequest(token_ids=[*tokens, EOS])
    assert (await client.stub.Detokenize(request)).text == text
    error = await error_of(client.stub.Detokenize(pb.DetokenizeRequest(token_ids=[1, 9999])))
    assert detail(error, error_details_pb2.BadRequest).field_violations[0].field == "token_ids[1]"
    error = await error_of(client.stub.Tokenize(pb.TokenizeRequest()))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_tokenize_works_on_chats(client: Client) -> None:
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")], continue_final_message=True)
    tokens = (await client.stub.Tokenize(pb.TokenizeRequest(chat=chat))).token_ids
    assert tokens == ids("<|im_start|>user\nhi")


async def test_a_message_of_any_length_reaches_its_client(start_router: StartRouter, tmp_path: Path) -> None:
    """gRPC would fail a call whose headers are too long."""
    template = "{{ raise_exception(messages[0].content) }}"
    client = await start_router(model=str(write_model(tmp_path / "strict", chat_template=template)))
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="😀" * 10_000)])

    error = await error_of(generate(client, pb.GenerateSpec(chat=chat)))

    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (error.details() or "").startswith("spec.chat.messages: the chat template failed: 😀")
    assert detail(error, error_details_pb2.ErrorInfo).reason == "CHAT_TEMPLATE"


async def test_reflection_names_the_service(client: Client) -> None:
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(client.channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    response = await stub.ServerReflectionInfo(iter([request])).read()
    names = {service.name for service in response.list_services_response.service}
    assert {"pagoda.v1.InferenceService", "grpc.health.v1.Health"} <= names


async def test_health_follows_the_schedulers(client: Client) -> None:
    status = health_pb2.HealthCheckResponse
    await client.wait_health(status.SERVING, "pagoda.v1.InferenceService")
    assert client.router.probes.ready
    await client.scheduler.stop()
    await client.wait_health(status.NOT_SERVING, "pagoda.v1.InferenceService")
    assert not client.router.probes.ready


async def test_drain_lets_running_requests_end_and_refuses_new_ones(client: Client) -> None:
    running = stream(client, spec())
    submit = await client.scheduler.accept()
    await running.read()
    drain = asyncio.create_task(client.router.drain())
    await client.wait_health(health_pb2.HealthCheckResponse.NOT_SERVING)
    error = await error_of(generate(client, spec()))
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "shutting down" in (error.details() or "")
    client.scheduler.send(submit, ids("fox"), LENGTH)
    assert (await running.read()).delta.text == "fox"
    assert (await running.read()).usage.completion_tokens == len(ids("fox"))
    assert await running.read() is EOF
    await drain


async def test_drain_delay_takes_new_requests_while_endpoints_propagate(start_router: StartRouter) -> None:
    client = await start_router(drain_delay=30)
    drain = asyncio.create_task(client.router.drain())
    await client.wait_health(health_pb2.HealthCheckResponse.NOT_SERVING)
    call = generate(client, spec())
    client.scheduler.send(await client.scheduler.accept(), ids("fox"), LENGTH)
    assert (await call).outputs[0].text == "fox"
    drain.cancel()


async def test_requests_that_outlive_the_grace_are_told_to_resume(start_router: StartRouter) -> None:
    client = await start_router(shutdown_grace=0.1)
    running = generate(client, spec())
    await client.scheduler.accept()
    drain = asyncio.create_task(client.router.drain())
    error = await error_of(running)
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "prior_outputs" in (error.details() or "")
    await drain


async def test_metrics_count_calls_by_code(client: Client) -> None:
    def count() -> float:
        return float(metrics.REQUESTS.labels("Generate", "INVALID_ARGUMENT")._value.get())

    before = count()
    await error_of(generate(client, pb.GenerateSpec()))
    assert count() == before + 1


async def test_scheduler_codes_are_known() -> None:
    assert {code.value[0] for code in grpc.StatusCode} == set(code_pb2.Code.values())


@pytest.mark.parametrize("flag", ["listen_address", "scheduler_addresses"])
async def test_bad_addresses_name_their_flag(start_router: StartRouter, client: Client, flag: str) -> None:
    taken = f"127.0.0.1:{client.router.port}"
    value: Any = taken if flag == "listen_address" else ("nonsense",)
    with pytest.raises(AddressError, match=f"--{flag.replace('_', '-')}"):
        await start_router([], **{"scheduler_addresses": ("127.0.0.1:1",), flag: value})
