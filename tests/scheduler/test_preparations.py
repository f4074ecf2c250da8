"""Constraints on the engine: the shard compiles them while others run, and again after a loss."""

import logging

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from pagoda.scheduler.v1.scheduler_pb2 import Abort
from pagoda.v1.inference_pb2 import Constraint, PriorOutput
from scheduler.preparations import MAX_CONCURRENT
from tests.scheduler.fake_shard import expected_output
from tests.scheduler.harness import submit
from tests.scheduler.test_engine import has_tokens, serving

INVALID_ARGUMENT = grpc.StatusCode.INVALID_ARGUMENT.value[0]
DIGITS = Constraint(regex="[0-9]+")


async def test_a_request_is_accepted_once_its_constraint_is_compiled() -> None:
    async with serving() as (engine, client, router):
        client.may_prepare.clear()
        engine.submit(router.outbox, submit("a", [1, 2], 5, stop=[7], constraint=DIGITS))
        await client.until_asked(1)
        assert not client.commands
        assert not router.accepted

        client.may_prepare.set()
        await router.until(lambda: router.reasons)

    assert router.tokens["a"] == expected_output([1, 2], 5, frozenset([7]))
    join = client.commands[0].joins[0]
    assert (join.constraint, list(join.stop_token_ids)) == (DIGITS, [7])


async def test_later_requests_pass_one_that_is_prepared_and_it_keeps_its_rank() -> None:
    async with serving(max_num_seqs=1) as (engine, client, router):
        client.may_prepare.clear()
        engine.submit(router.outbox, submit("first", [1], 5, constraint=DIGITS))
        engine.submit(router.outbox, submit("second", [2], 5))
        await router.until(lambda: "second" in router.reasons)
        client.may_answer.clear()
        engine.submit(router.outbox, submit("third", [3], 5))
        engine.submit(router.outbox, submit("fourth", [4], 5))
        client.may_prepare.set()
        await router.until(lambda: "first" in router.accepted)
        client.may_answer.set()
        await router.until(lambda: len(router.reasons) == 4)

    assert list(router.reasons) == ["second", "third", "first", "fourth"]


async def test_what_the_shard_can_not_honour_is_refused_with_its_reason() -> None:
    async with serving() as (engine, client, router):
        client.constraint_error = "uniqueItems at # isn't supported"
        engine.submit(router.outbox, submit("a", [1], 5, constraint=DIGITS))
        await router.until(lambda: router.refused)

    refused = router.refused["a"]
    assert refused.code == INVALID_ARGUMENT
    assert (refused.field, refused.message) == ("spec.constraint", client.constraint_error)
    assert not router.accepted


async def test_what_there_is_of_an_output_must_keep_to_its_constraint() -> None:
    async with serving() as (engine, client, router):
        prior = PriorOutput(token_ids=[7, 8])
        client.broken_outputs = [prior]
        engine.submit(router.outbox, submit("a", [1], 5, constraint=DIGITS, prior_outputs=[prior]))
        await router.until(lambda: router.refused)

    refused = router.refused["a"]
    assert (refused.code, refused.field) == (INVALID_ARGUMENT, "spec.prior_outputs")
    assert not router.accepted


async def test_what_a_constraint_holds_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with serving() as (engine, client, router):
        client.constraint_error = "const at # has no value 'my secret'"
        engine.submit(router.outbox, submit("a", [1], 5, constraint=DIGITS))
        await router.until(lambda: router.refused)

    assert "failed: INVALID_ARGUMENT on spec.constraint" in caplog.messages
    assert "my secret" not in caplog.text


async def test_few_constraints_are_compiled_at_once() -> None:
    async with serving(max_num_seqs=4) as (engine, client, router):
        client.may_prepare.clear()
        for index in range(MAX_CONCURRENT + 3):
            engine.submit(router.outbox, submit(f"r{index}", [1], 2, constraint=DIGITS))
        await client.until_asked(MAX_CONCURRENT)
        engine.submit(router.outbox, submit("free", [1], 2))
        await router.until(lambda: "free" in router.reasons)
        assert len(client.prepared) == MAX_CONCURRENT

        client.may_prepare.set()
        await router.until(lambda: len(router.reasons) == MAX_CONCURRENT + 4)


async def test_abort_ends_a_request_that_is_being_prepared() -> None:
    async with serving() as (engine, client, router):
        client.may_prepare.clear()
        message = submit("a", [1], 5, n=2, constraint=DIGITS)
        engine.submit(router.outbox, message)
        await client.until_asked(1)

        engine.abort(router.outbox, Abort(key=message.key))

        await engine.wait_idle()
        assert engine.scheduler
        assert not engine.scheduler.waiting
    assert not router.accepted


async def test_a_router_that_leaves_takes_what_is_being_prepared_with_it() -> None:
    async with serving() as (engine, client, router):
        client.may_prepare.clear()
        engine.submit(router.outbox, submit("a", [1], 5, constraint=DIGITS))
        await client.until_asked(1)

        engine.detach(router.outbox)

        await engine.wait_idle()


async def test_a_deadline_passes_while_the_constraint_is_compiled() -> None:
    async with serving() as (engine, client, router):
        client.may_prepare.clear()
        soon = Duration(nanos=1_000_000)
        engine.submit(router.outbox, submit("a", [1], 5, constraint=DIGITS, deadline_remaining=soon))
        await router.until(lambda: router.refused)
    assert router.refused["a"].code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]


async def test_after_a_loss_constraints_are_compiled_again_before_requests_rejoin() -> None:
    async with serving() as (engine, client, router):
        client.may_answer.clear()
        engine.submit(router.outbox, submit("a", [1], 20, constraint=DIGITS))
        engine.submit(router.outbox, submit("b", [2], 20))
        await client.until_sent(2)
        client.may_prepare.clear()

        client.lose()
        client.may_answer.set()
        await client.until_asked(2)
        await router.until(lambda: "b" in router.reasons)
        assert not has_tokens(router, "a", 1)
        client.may_prepare.set()
        await router.until(lambda: "a" in router.reasons)

    assert router.tokens["a"] == expected_output([1], 20)
    assert router.accepted.count("a") == 1


async def test_a_shard_that_is_away_is_asked_again() -> None:
    async with serving() as (engine, client, router):
        client.away = True
        engine.submit(router.outbox, submit("a", [1], 5, constraint=DIGITS))
        await client.until_asked(2)

        client.away = False
        await router.until(lambda: router.reasons)

    assert router.tokens["a"] == expected_output([1], 5)


async def test_a_row_without_a_token_says_that_the_constraint_may_be_why() -> None:
    async with serving() as (engine, client, router):
        client.invalid = True
        engine.submit(router.outbox, submit("a", [1], 5, constraint=DIGITS))
        await router.until(lambda: router.refused)

    assert router.refused["a"].code == grpc.StatusCode.INTERNAL.value[0]
    assert "spec.constraint" in router.refused["a"].message
