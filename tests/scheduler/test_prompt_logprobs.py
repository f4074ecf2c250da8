"""Log-probabilities of a prompt: each token's once, in order, whatever was computed twice."""

import asyncio

import pytest

from common.rpc import MAX_MESSAGE_BYTES
from pagoda.scheduler.v1.scheduler_pb2 import Load, RequestKey, SequenceOutput
from pagoda.v1.inference_pb2 import PriorOutput
from pagoda.v1.sampling_pb2 import PositionLogprobs, TokenLogprob
from scheduler.outbox import Outbox
from tests.scheduler.fake_shard import prompt_logprob
from tests.scheduler.harness import Harness, limits, submit

PROMPT = list(range(100, 130))
WHOLE = [prompt_logprob(PROMPT, position) for position in range(1, len(PROMPT))]


def test_they_come_as_chunks_are_computed() -> None:
    harness = Harness(limits(max_num_batched_tokens=16))
    harness.add(submit("a", PROMPT, 3, prompt_logprobs=0))

    harness.send()
    harness.receive()

    assert harness.prompt_logprobs["a"] == WHOLE[:16]
    assert harness.outputs["a"] == []
    harness.run()
    assert harness.prompt_logprobs["a"] == WHOLE


def test_cached_blocks_are_computed_again_and_can_be_found_by_others() -> None:
    harness = Harness(limits())
    harness.add(submit("first", PROMPT, 1))
    harness.run()
    harness.add(submit("asking", PROMPT, 1, prompt_logprobs=0))
    harness.run()
    computed = harness.shard.computed_tokens

    harness.add(submit("last", PROMPT, 1))
    harness.run()

    assert computed == 2 * len(PROMPT)
    assert harness.prompt_logprobs["asking"] == WHOLE
    assert harness.shard.computed_tokens - computed == len(PROMPT) - 28


def test_a_preempted_prefill_goes_on_from_cached_blocks_with_what_is_missing() -> None:
    harness = Harness(limits(num_blocks=11, max_num_batched_tokens=8))
    harness.add(submit("first", list(range(11)), 5))
    harness.add(submit("asking", PROMPT, 2, prompt_logprobs=0), arrival=1)

    harness.run()

    assert harness.scheduler.totals.preemptions > 0
    assert harness.scheduler.totals.hit_tokens > 0
    assert harness.prompt_logprobs["asking"] == WHOLE


def test_a_lost_shard_costs_those_in_flight_a_second_time_and_no_others() -> None:
    harness = Harness(limits(max_num_batched_tokens=8))
    harness.add(submit("a", PROMPT, 1, prompt_logprobs=0))
    harness.send()
    harness.receive()
    harness.send()
    harness.fail()

    harness.run()

    assert harness.prompt_logprobs["a"] == WHOLE


def test_a_step_returns_no_more_than_a_message_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler.scheduler.MAX_STEP_LOGPROBS", 21)
    harness = Harness(limits(num_blocks=24))
    for name in "ab":
        harness.add(submit(name, PROMPT, 1, prompt_logprobs=1))
    harness.add(submit("c", [1, 2, 3], 1))

    plan = harness.send()

    assert plan
    assert [(s.request.key[0], count) for s, count in plan.scheduled] == [
        ("a", 8),
        ("b", 2),
        ("c", 3),
    ]
    harness.run()
    assert harness.prompt_logprobs["a"] == harness.prompt_logprobs["b"] == WHOLE


def test_one_of_several_outputs_reports_them() -> None:
    harness = Harness(limits())
    harness.add(submit("a", PROMPT, 2, n=3, prompt_logprobs=0))

    harness.run()

    assert harness.prompt_logprobs["a"] == WHOLE
    assert harness.shard.computed_tokens == len(PROMPT) + 3


def test_an_attempt_with_tokens_reports_them_all_the_same() -> None:
    """A router that has tokens may lack them still."""
    priors = [PriorOutput(index=0, finished=True), PriorOutput(index=1, token_ids=[7])]
    harness = Harness(limits())
    harness.add(submit("a", PROMPT, 3, n=2, prompt_logprobs=0, prior_outputs=priors))

    harness.run()

    assert harness.prompt_logprobs["a"] == WHOLE


async def test_a_slow_router_gets_them_in_messages_that_fit() -> None:
    outbox = Outbox()
    position = PositionLogprobs(top=[TokenLogprob(token_id=49_000, logprob=-1)] * 20)
    keys = [RequestKey(request_id=name) for name in "abcde"]
    for half in range(2):
        for handle, key in enumerate(keys):
            message = SequenceOutput(key=key, prompt_logprobs=[position] * 8_000, token_ids=[half])
            outbox.add_output(handle, message)
        outbox.flush(Load())

    messages = await asyncio.wait_for(outbox.take(), timeout=1)

    outputs = [output for message in messages for output in message.outputs.sequences]
    assert [output.key for output in outputs] == keys
    assert all(list(output.token_ids) == [0, 1] for output in outputs)
    assert {len(output.prompt_logprobs) for output in outputs} == {16_000}
    assert len(messages) > 1
    assert all(message.ByteSize() < MAX_MESSAGE_BYTES for message in messages)
