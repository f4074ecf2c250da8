"""What one router is sent, and in which order."""

import asyncio

from pagoda.scheduler.v1.scheduler_pb2 import Load, RequestKey, SequenceOutput, ServeResponse
from scheduler.outbox import Outbox

KEY = RequestKey(request_id="a")


async def taken(outbox: Outbox) -> list[ServeResponse]:
    outbox.flush(Load(running=3))
    return await asyncio.wait_for(outbox.take(), timeout=1)


async def test_one_message_has_all_tokens_of_a_step() -> None:
    outbox = Outbox()
    for handle in range(3):
        outbox.add_token(handle, 10 + handle)
    outbox.add_output(3, SequenceOutput(key=KEY, token_ids=[13]))

    (message,) = await taken(outbox)

    assert list(message.outputs.handles) == [0, 1, 2]
    assert list(message.outputs.token_ids) == [10, 11, 12]
    assert [list(output.token_ids) for output in message.outputs.sequences] == [[13]]
    assert message.outputs.load.running == 3


async def test_what_begins_an_output_comes_first() -> None:
    outbox = Outbox()
    outbox.add_token(0, 10)
    outbox.add_token(1, 11, begins=True)
    outbox.add_output(2, SequenceOutput(key=KEY, token_ids=[12]), begins=True)

    first, then = await taken(outbox)

    assert list(first.outputs.token_ids) == [11]
    assert [list(output.token_ids) for output in first.outputs.sequences] == [[12]]
    assert list(then.outputs.token_ids) == [10]


async def test_a_slow_router_gets_each_outputs_tokens_in_order() -> None:
    outbox = Outbox()
    outbox.add_token(0, 1, begins=True)
    outbox.flush(Load())
    outbox.add_token(0, 2)
    outbox.flush(Load())
    outbox.add_output(0, SequenceOutput(key=KEY, token_ids=[3]))

    messages = await taken(outbox)

    order: list[int] = []
    for message in messages:
        order += message.outputs.token_ids
        order += [token for output in message.outputs.sequences for token in output.token_ids]
    assert order == [1, 2, 3]


async def test_nothing_is_sent_twice() -> None:
    outbox = Outbox()
    outbox.add_token(0, 1, begins=True)
    await taken(outbox)
    outbox.add_token(0, 2)

    (message,) = await taken(outbox)

    assert list(message.outputs.token_ids) == [2]
