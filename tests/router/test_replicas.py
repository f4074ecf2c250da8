"""Which replica a request is submitted to."""

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
import pytest

from pagoda.scheduler.v1 import scheduler_pb2
from pagoda.v1 import inference_pb2 as pb
from router.discovery import Discovery
from router.replicas import Replicas
from router.scheduler_link import Connection
from tests.router.conftest import Client, StartRouter
from tests.router.fake_scheduler import STOP, FakeScheduler

BEGINNING = [number % 400 + 2 for number in range(64)]


@pytest.fixture
async def client(start_router: StartRouter) -> Client:
    return await start_router([FakeScheduler() for _ in range(4)])


def generate(client: Client, token_ids: Sequence[int], **fields: Any) -> Any:
    spec = pb.GenerateSpec(token_ids=pb.TokenIds(ids=token_ids), **fields)
    return asyncio.ensure_future(client.stub.Generate(pb.GenerateRequest(spec=spec)))


async def taker(client: Client) -> tuple[FakeScheduler, scheduler_pb2.Submit]:
    """Who is given the next request, which it accepts."""
    waits = {asyncio.ensure_future(fake.accept()): fake for fake in client.schedulers}
    done, others = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for other in others:
        other.cancel()
    [task] = done
    return waits[task], task.result()


async def answered_by(client: Client, token_ids: Sequence[int], **fields: Any) -> FakeScheduler:
    call = generate(client, token_ids, **fields)
    fake, submit = await taker(client)
    fake.send(submit, [1], STOP)
    await call
    return fake


async def test_what_begins_alike_goes_to_one_replica(client: Client) -> None:
    takers = {await answered_by(client, [*BEGINNING, *range(2, 2 + 20 * turn)]) for turn in range(8)}

    assert len(takers) == 1


async def test_salts_that_share_no_blocks_are_spread(client: Client) -> None:
    takers = {await answered_by(client, BEGINNING, cache_salt=f"salt {number}") for number in range(16)}

    assert len(takers) > 1


async def test_a_resumed_request_goes_where_its_prompt_was_computed(client: Client) -> None:
    here = await answered_by(client, BEGINNING)
    sampling = {"sampling": {"seed": 5}, "prior_outputs": [pb.PriorOutput(token_ids=[40, 41])]}

    assert await answered_by(client, BEGINNING, **sampling) is here


async def test_who_refuses_is_passed_over_although_it_has_the_prompt(client: Client) -> None:
    here = await answered_by(client, BEGINNING)
    call = generate(client, BEGINNING)
    await here.refuse(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")

    there, submit = await taker(client)
    there.send(submit, [1], STOP)

    await call
    assert there is not here


def test_without_a_choice_nothing_is_hashed() -> None:
    only = Connection(scheduler_pb2.Hello(), "127.0.0.1:7")

    def hashes() -> Sequence[bytes]:
        raise AssertionError("hashed for nothing")

    assert Replicas(Discovery([])).choose([only], hashes) is only
