"""The engine on a fake shard: requests through outboxes, epochs, deadlines, drain."""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from common.otlp import Tracer
from common.probes import Probes
from pagoda.scheduler.v1.scheduler_pb2 import Abort, RequestRefused, Submit
from pagoda.v1.inference_pb2 import FINISH_REASON_LENGTH, BeamSearch, FinishReason, PriorOutput
from scheduler.config import SchedulerConfig
from scheduler.engine import Engine
from scheduler.invariants import check
from scheduler.limits import FatalError
from scheduler.outbox import Outbox
from scheduler.pace import Pace
from tests.scheduler.fake_client import FakeShardClient, description
from tests.scheduler.fake_shard import expected_output
from tests.scheduler.harness import submit
from tests.scheduler.reading import OutputReader


class Router:
    """Reads an outbox as a router's stream would."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.outbox = Outbox()
        self.accepted: list[str] = []
        self.refused: dict[str, RequestRefused] = {}
        # Of the first output; of all of them by index.
        self.tokens: dict[str, list[int]] = {}
        self.outputs: dict[tuple[str, int], list[int]] = {}
        self.cached: dict[str, int] = {}
        self.finished = 0
        self.reasons: dict[str, FinishReason.ValueType] = {}
        self._changed = asyncio.Event()
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        reader = OutputReader()
        while True:
            for message in await self.outbox.take():
                if message.HasField("accepted"):
                    self.accepted.append(message.accepted.key.request_id)
                elif message.HasField("refused"):
                    self.refused[message.refused.key.request_id] = message.refused
                for output in reader.read(message):
                    name = output.key.request_id
                    assert name in self.accepted
                    self.outputs.setdefault((name, output.output_index), []).extend(output.token_ids)
                    self.tokens[name] = self.outputs.get((name, 0), [])
                    self.cached.setdefault(name, output.cached_tokens)
                    self.finished += bool(output.finish_reason)
                    if output.finish_reason:
                        self.reasons[name] = output.finish_reason
            self._changed.set()

    async def until(self, done: Callable[[], Any]) -> None:
        async with asyncio.timeout(10):
            while not done():
                self._changed.clear()
                await self._changed.wait()

    def close(self) -> None:
        self._reader.cancel()


def has_tokens(router: Router, name: str, count: int) -> bool:
    return len(router.tokens.get(name, [])) >= count


@contextlib.asynccontextmanager
async def serving(
    client: FakeShardClient | None = None, tracer: Tracer | None = None, **options: Any
) -> AsyncIterator[tuple[Engine, FakeShardClient, Router]]:
    """An engine that runs, and a router attached to it. At the end every block is free."""
    client = client or FakeShardClient()
    defaults = {"block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    config = SchedulerConfig(shard_addresses=("fake",), **{**defaults, **options})
    engine = Engine(config, client, Probes(), tracer)
    running = asyncio.create_task(engine.run())
    router = Router(engine)
    try:
        await asyncio.wait(
            {running, asyncio.create_task(engine.ready.wait())}, return_when=asyncio.FIRST_COMPLETED
        )
        if running.done():
            await running
        yield engine, client, router
        assert engine.scheduler
        check(engine.scheduler)
        assert engine.scheduler.blocks.device.num_used == 0, "blocks are left"
    finally:
        router.close()
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError, FatalError):
            await running


async def test_requests_are_accepted_and_their_tokens_come() -> None:
    async with serving() as (engine, _, router):
        for index in range(10):
            engine.submit(router.outbox, submit(f"r{index}", [index] * (index + 1), 12))
        await router.until(lambda: len(router.reasons) == 10)

    for index in range(10):
        assert router.tokens[f"r{index}"] == expected_output([index] * (index + 1), 12)
        assert router.reasons[f"r{index}"] == FINISH_REASON_LENGTH


async def test_two_steps_are_in_flight() -> None:
    async with serving() as (engine, client, router):
        client.may_answer.clear()
        engine.submit(router.outbox, submit("a", [1, 2], 5))
        await client.until_sent(2)
        assert [command.step for command in client.commands] == [0, 1]
        client.may_answer.set()
        await router.until(lambda: router.reasons)
    assert router.tokens["a"] == expected_output([1, 2], 5)


async def test_the_step_behind_a_long_one_takes_what_arrives_while_it_is_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    holds = [100.0]
    monkeypatch.setattr(Pace, "hold_s", lambda self, running_s: holds[0])
    async with serving() as (engine, client, router):
        client.may_answer.clear()
        engine.submit(router.outbox, submit("a", [1, 2], 5))
        await client.until_sent(1)

        holds[0] = 0.0
        engine.submit(router.outbox, submit("b", [3, 4], 5))
        await client.until_sent(2)

        assert [len(command.joins) for command in client.commands] == [1, 1]
        client.may_answer.set()
        await router.until(lambda: len(router.reasons) == 2)
    assert router.tokens["b"] == expected_output([3, 4], 5)


async def test_a_result_ends_the_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pace, "hold_s", lambda self, running_s: 100.0)
    async with serving() as (engine, _, router):
        engine.submit(router.outbox, submit("a", [1, 2], 5))
        await router.until(lambda: router.reasons)
    assert router.tokens["a"] == expected_output([1, 2], 5)


async def test_abort_frees_blocks_before_the_next_step() -> None:
    async with serving() as (engine, client, router):
        client.may_answer.clear()
        message = submit("a", [1] * 9, 50)
        engine.submit(router.outbox, message)
        await client.until_sent(2)
        assert engine.scheduler
        assert engine.scheduler.blocks.device.num_used == 3

        engine.abort(router.outbox, Abort(key=message.key))

        assert engine.scheduler.blocks.device.num_used == 0
        client.may_answer.set()


async def test_a_router_that_leaves_takes_its_requests_along() -> None:
    async with serving() as (engine, _, router):
        other = Outbox()
        for index in range(6):
            engine.submit(other, submit(f"gone{index}", [index], 100))
        engine.submit(router.outbox, submit("stays", [7], 5))

        engine.detach(other)

        await router.until(lambda: router.reasons)
    assert router.tokens["stays"] == expected_output([7], 5)


async def test_a_deadline_ends_the_request() -> None:
    async with serving() as (engine, client, router):
        client.may_answer.clear()
        message = submit("a", [1], 50)
        message.deadline_remaining.CopyFrom(Duration(nanos=1_000_000))
        engine.submit(router.outbox, message)
        await router.until(lambda: router.refused)
        client.may_answer.set()
    assert router.refused["a"].code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]


async def test_several_outputs_of_one_prompt() -> None:
    async with serving() as (engine, client, router):
        engine.submit(router.outbox, submit("a", [1, 2, 3, 4, 5], 10, n=3))
        await router.until(lambda: router.finished == 3)
    for index in range(3):
        expected = expected_output([1, 2, 3, 4, 5], 10, output_index=index)
        assert router.outputs["a", index] == expected
    # The prompt is computed once.
    computed = sum(s.num_tokens for command in client.commands for s in command.scheduled)
    assert computed == 5 + 3 * 9


async def test_the_prompt_of_later_requests_is_found() -> None:
    prompt = list(range(50))
    async with serving() as (engine, _, router):
        engine.submit(router.outbox, submit("first", prompt, 2))
        await router.until(lambda: router.finished == 1)
        engine.submit(router.outbox, submit("second", prompt, 2))
        engine.submit(router.outbox, submit("salted", prompt, 2, cache_salt="mine"))
        await router.until(lambda: router.finished == 3)
        assert engine.flush_prefix_cache() > 0
        engine.submit(router.outbox, submit("after", prompt, 2))
        await router.until(lambda: router.finished == 4)
    assert router.cached == {"first": 0, "second": 48, "salted": 0, "after": 0}
    assert router.tokens["second"] == router.tokens["first"] == router.tokens["after"]


async def test_a_lost_shard_is_a_pause_without_a_lost_or_repeated_token() -> None:
    async with serving() as (engine, client, router):
        for index in range(3):
            engine.submit(router.outbox, submit(f"r{index}", [index] * 3, 40))
        for count in (5, 15, 25):
            await router.until(functools.partial(has_tokens, router, "r2", count))
            client.lose()
        await router.until(lambda: len(router.reasons) == 3)
    for index in range(3):
        assert router.tokens[f"r{index}"] == expected_output([index] * 3, 40)
    assert [request.epoch for request in client.configured] == [1, 2, 3, 4]


async def test_a_request_that_kills_its_shard_each_time_fails_at_last() -> None:
    async with serving() as (engine, client, router):
        client.failing = True
        engine.submit(router.outbox, submit("a", [1], 50))
        await router.until(lambda: router.refused)
        client.failing = False
        engine.submit(router.outbox, submit("b", [1], 5))
        await router.until(lambda: router.reasons)
    assert router.refused["a"].code == grpc.StatusCode.INTERNAL.value[0]
    assert "failed 4 times" in router.refused["a"].message
    assert router.tokens["b"] == expected_output([1], 5)


async def test_logits_that_are_not_finite_fail_that_request() -> None:
    async with serving() as (engine, client, router):
        client.invalid = True
        engine.submit(router.outbox, submit("a", [1], 50))
        await router.until(lambda: router.refused)
        client.invalid = False
        engine.submit(router.outbox, submit("b", [1], 5))
        await router.until(lambda: router.reasons)
    assert "not finite" in router.refused["a"].message
    assert router.tokens["b"] == expected_output([1], 5)


async def test_resumed_outputs_go_on_where_they_were() -> None:
    whole = expected_output([4, 5], 12)
    async with serving() as (engine, _, router):
        message = submit("a", [4, 5], 12)
        message.prior_outputs.append(PriorOutput(index=0, token_ids=whole[:7]))
        engine.submit(router.outbox, message)
        await router.until(lambda: router.reasons)
    assert router.tokens["a"] == whole[7:]


@pytest.mark.parametrize(
    ("change", "code", "text"),
    [
        ({"prompt_token_ids": []}, "INVALID_ARGUMENT", "no tokens"),
        ({"prompt_token_ids": [1] * 256}, "INVALID_ARGUMENT", "max_model_len is 256"),
        ({"prompt_token_ids": [1000]}, "INVALID_ARGUMENT", "token id 1000"),
        ({"max_tokens": 255}, "INVALID_ARGUMENT", "at most 254"),
        ({"model_revision": "other"}, "FAILED_PRECONDITION", "'other'"),
        ({"n": 5}, "INVALID_ARGUMENT", "5 is above max_num_seqs"),
        ({"beam_search": BeamSearch(beam_width=5)}, "INVALID_ARGUMENT", "5 is above max_num_seqs"),
        ({"n": 4, "max_tokens": 80}, "INVALID_ARGUMENT", "for 4 sequences holds"),
        ({"adapter": "lora"}, "UNIMPLEMENTED", "spec.adapter"),
        ({"prior_outputs": [PriorOutput(token_ids=[1] * 9)]}, "INVALID_ARGUMENT", "9 prior tokens"),
    ],
)
async def test_what_can_not_be_served_is_refused_with_the_reason(
    change: dict[str, Any], code: str, text: str
) -> None:
    async with serving() as (engine, _, router):
        message = submit("a", [1, 2], 9)
        for field, value in change.items():
            message.ClearField(field)  # type: ignore[arg-type]
            merged = type(message)(**{field: value})
            message.MergeFrom(merged)
        engine.submit(router.outbox, message)
        await router.until(lambda: router.refused)
    refused = router.refused["a"]
    assert refused.code == grpc.StatusCode[code].value[0]
    assert text in refused.message
    assert not router.accepted


async def test_what_the_whole_pool_can_not_hold_is_refused() -> None:
    async with serving(num_gpu_blocks_override=3) as (engine, _, router):
        engine.submit(router.outbox, submit("long prompt", [1] * 13, 1))
        engine.submit(router.outbox, submit("long output", [1] * 4, 10))
        engine.submit(router.outbox, submit("fits", [1] * 4, 9))
        await router.until(lambda: router.reasons)
    assert "holds 12" in router.refused["long prompt"].message
    assert "at most 9" in router.refused["long output"].message
    assert len(router.tokens["fits"]) == 9


async def test_a_full_queue_refuses_with_a_hint_and_harms_nobody() -> None:
    async with serving(max_waiting_requests=2, max_num_seqs=1) as (engine, client, router):
        client.may_answer.clear()
        engine.submit(router.outbox, submit("running", [1], 9))
        await client.until_sent(1)
        for index in range(4):
            engine.submit(router.outbox, submit(f"r{index}", [index], 9))
        resumed = submit("resumed", [1], 9)
        resumed.prior_outputs.append(PriorOutput(token_ids=expected_output([1], 9)[:2]))
        engine.submit(router.outbox, resumed)
        client.may_answer.set()
        await router.until(lambda: len(router.reasons) == 4)
    assert sorted(router.refused) == ["r2", "r3"]
    assert router.refused["r2"].code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
    assert router.refused["r2"].retry_delay.ToMilliseconds() == 1000
    assert sorted(router.reasons) == ["r0", "r1", "resumed", "running"]


def of_tenant(name: str, tenant: str, limit: int, max_tokens: int = 200, **fields: Any) -> Submit:
    return submit(name, [1, 2], max_tokens, tenant=tenant, max_tenant_requests=limit, **fields)


async def test_a_tenant_has_so_many_requests_here_and_no_more() -> None:
    async with serving(max_num_seqs=1) as (engine, client, router):
        client.may_answer.clear()
        other_router = Router(engine)
        # Running, waiting, and through another router.
        for name in ("a", "b"):
            engine.submit(router.outbox, of_tenant(name, "acme", 3))
        engine.submit(other_router.outbox, of_tenant("c", "acme", 3))
        engine.submit(router.outbox, of_tenant("too many", "acme", 3))
        engine.submit(router.outbox, of_tenant("of another", "other", 3))
        engine.submit(router.outbox, of_tenant("without a limit", "acme", 0))
        await router.until(lambda: router.refused and len(router.accepted) == 4)
        for outbox in (router.outbox, other_router.outbox):
            engine.detach(outbox)
        other_router.close()
        client.may_answer.set()

    (refused,) = router.refused.values()
    assert refused.key.request_id == "too many"
    assert refused.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
    assert refused.message == "3 requests of key 'acme' are here already; its limit is 3"
    assert refused.retry_delay.ToMilliseconds() == 1000


async def finishes(engine: Engine, client: FakeShardClient, router: Router) -> None:
    engine.submit(router.outbox, of_tenant("a", "acme", 1, max_tokens=2, n=2))
    await router.until(lambda: router.finished == 2)


async def is_aborted(engine: Engine, client: FakeShardClient, router: Router) -> None:
    message = of_tenant("a", "acme", 1, n=2)
    engine.submit(router.outbox, message)
    engine.abort(router.outbox, Abort(key=message.key, output_index=0))
    engine.abort(router.outbox, Abort(key=message.key))
    engine.abort(router.outbox, Abort(key=message.key))


async def loses_its_router(engine: Engine, client: FakeShardClient, router: Router) -> None:
    gone = Outbox()
    engine.submit(gone, of_tenant("a", "acme", 1))
    engine.detach(gone)


async def passes_its_deadline(engine: Engine, client: FakeShardClient, router: Router) -> None:
    engine.submit(router.outbox, of_tenant("a", "acme", 1, deadline_remaining=Duration(nanos=1)))
    await router.until(lambda: router.refused)


async def fails(engine: Engine, client: FakeShardClient, router: Router) -> None:
    client.invalid = True
    engine.submit(router.outbox, of_tenant("a", "acme", 1))
    await router.until(lambda: router.refused)
    client.invalid = False


async def is_refused(engine: Engine, client: FakeShardClient, router: Router) -> None:
    engine.submit(router.outbox, of_tenant("a", "acme", 1, adapter="lora"))


async def had_ended_before(engine: Engine, client: FakeShardClient, router: Router) -> None:
    engine.submit(router.outbox, of_tenant("a", "acme", 1, prior_outputs=[PriorOutput(finished=True)]))


@pytest.mark.parametrize(
    "end",
    [
        finishes,
        is_aborted,
        loses_its_router,
        passes_its_deadline,
        fails,
        is_refused,
        had_ended_before,
    ],
)
async def test_a_request_counts_until_it_ends_however_it_does(
    end: Callable[[Engine, FakeShardClient, Router], Awaitable[None]],
) -> None:
    async with serving() as (engine, client, router):
        await end(engine, client, router)

        engine.submit(router.outbox, of_tenant("next", "acme", 1, max_tokens=2))
        engine.submit(router.outbox, of_tenant("too many", "acme", 1))
        await router.until(lambda: "next" in router.reasons and "too many" in router.refused)

    assert "next" not in router.refused


async def test_a_lost_shard_counts_nobody_twice_nor_forgets_anybody() -> None:
    async with serving() as (engine, client, router):
        engine.submit(router.outbox, of_tenant("a", "acme", 1, max_tokens=40))
        await router.until(lambda: has_tokens(router, "a", 5))
        client.lose()
        engine.submit(router.outbox, of_tenant("too many", "acme", 1))
        await router.until(lambda: router.reasons)
        engine.submit(router.outbox, of_tenant("next", "acme", 1, max_tokens=2))
        await router.until(lambda: len(router.reasons) == 2)

    assert list(router.refused) == ["too many"]


async def test_tenants_never_find_each_others_prompts() -> None:
    prompt = list(range(50))
    async with serving() as (engine, _, router):
        for count, (name, tenant, salt) in enumerate(
            [
                ("first", "acme", ""),
                ("the same key", "acme", ""),
                ("another key", "other", ""),
                ("no key", "", ""),
                # What one may choose can't make it another.
                ("salted", "", "acme"),
                ("salted with more", "acm", "e"),
            ],
            1,
        ):
            engine.submit(router.outbox, submit(name, prompt, 2, tenant=tenant, cache_salt=salt))
            await router.until(lambda count=count: router.finished == count)  # type: ignore[misc]

    assert [name for name, cached in router.cached.items() if cached] == ["the same key"]


async def test_drain_refuses_new_requests_and_finishes_the_rest() -> None:
    async with serving() as (engine, _, router):
        engine.submit(router.outbox, submit("a", [1], 20))
        engine.stop_admitting()
        engine.submit(router.outbox, submit("late", [1], 20))
        async with asyncio.timeout(10):
            await engine.wait_idle()
        await router.until(lambda: router.reasons and router.refused)
    assert len(router.tokens["a"]) == 20
    assert router.refused["late"].code == grpc.StatusCode.UNAVAILABLE.value[0]


async def test_the_engine_waits_for_a_shard_that_loads() -> None:
    client = FakeShardClient()
    client.away = True
    config = SchedulerConfig(shard_addresses=("fake",))
    probes = Probes()
    engine = Engine(config, client, probes)
    running = asyncio.create_task(engine.run())
    await asyncio.sleep(0.05)
    assert not engine.ready.is_set()
    assert not probes.ready

    client.away = False
    async with asyncio.timeout(5):
        await engine.ready.wait()
    assert probes.ready
    running.cancel()


@pytest.mark.parametrize(
    ("described", "options", "text"),
    [
        ({"protocol_version": 99}, {}, "protocol 99"),
        ({"kv_capacity_bytes": 3}, {}, "no block fits"),
        ({}, {"num_gpu_blocks_override": 65}, "above the 64 blocks"),
        ({}, {"max_model_len": 257}, "above the 256 tokens"),
        ({"max_model_len": 1}, {}, "holds 1 token"),
        ({}, {"max_num_batched_tokens": 7}, "must be at least"),
    ],
)
async def test_a_shard_and_a_configuration_that_do_not_fit_are_fatal(
    described: dict[str, Any], options: dict[str, Any], text: str
) -> None:
    with pytest.raises(FatalError, match=text):
        async with serving(FakeShardClient(description(**described)), **options):
            pass


async def test_a_shard_that_can_not_be_configured_is_fatal() -> None:
    client = FakeShardClient()
    client.configuration_error = "no room"

    with pytest.raises(FatalError, match="can't be configured like this: no room"):
        async with serving(client):
            pass


async def test_another_model_after_a_loss_is_fatal() -> None:
    client = FakeShardClient()
    engine = Engine(SchedulerConfig(shard_addresses=("fake",)), client, Probes())
    running = asyncio.create_task(engine.run())
    await engine.ready.wait()

    client.described.model_revision = "other"
    client.lose()

    with pytest.raises(FatalError, match="another model"):
        async with asyncio.timeout(5):
            await running
