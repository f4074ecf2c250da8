"""Deltas, from commands to tables on the device."""

from typing import Any

import pytest
import torch

from pagoda.shard.v1.shard_pb2 import BlockUpdate, ConfigureRequest, ExecuteRequest, Join, NextToken
from shard import warm_up
from shard.executor import StepExecutor
from shard.slots import Slots
from shard.upload import Upload

CPU = torch.device("cpu")


def slots() -> Slots:
    return Slots(count=3, max_model_len=10, num_blocks=8, block_size=4, device=CPU)


def deltas(held: Slots) -> list[list[int]]:
    return [[*map(int, numbers)] for numbers in held.take_deltas()]


def test_what_joins_lies_one_after_the_other() -> None:
    held = slots()

    held.apply(ExecuteRequest(joins=[Join(slot=2, token_ids=[5, 6, 7], block_ids=[4, 1])]))

    assert deltas(held) == [[20, 21, 22], [5, 6, 7], [], [], [6, 7], [4, 1]]
    assert deltas(held) == [[]] * 6


def test_two_that_join_are_written_together() -> None:
    held = slots()

    held.apply(ExecuteRequest(joins=[Join(slot=2, token_ids=[5, 6]), Join(slot=0, token_ids=[7])]))

    assert deltas(held)[:2] == [[20, 21, 0], [5, 6, 7]]


def test_of_two_blocks_for_a_place_the_later_counts_and_overrides_come_after_joins() -> None:
    held = slots()

    held.apply(
        ExecuteRequest(
            joins=[Join(slot=0, token_ids=[5, 6], block_ids=[4, 1])],
            block_updates=[BlockUpdate(slot=0, start=1, block_ids=[3])],
            next_tokens=[NextToken(slot=0, token_id=9)],
        )
    )

    assert deltas(held) == [[0, 1], [5, 6], [1], [9], [0, 1], [4, 3]]


def test_sections_arrive_in_order_at_the_same_place() -> None:
    upload = Upload(6, CPU)
    address = upload.buffer.data_ptr()

    sent = upload.send([1, 2], [], [3])
    assert [section.tolist() for section in sent] == [[1, 2], [], [3]]

    upload.send([4, 5], [6])
    assert upload.buffer.tolist()[:3] == [4, 5, 6]
    assert upload.buffer.data_ptr() == address


def test_more_than_fits_arrives_too() -> None:
    upload = Upload(3, CPU)

    sent = upload.send([1, 2], [3, 4, 5])

    assert [section.tolist() for section in sent] == [[1, 2], [3, 4, 5]]
    assert upload.buffer.tolist() == [1, 2, 3]


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [
        {
            "num_blocks": 1,
            "block_size": 1,
            "max_num_seqs": 1,
            "max_num_batched_tokens": 2,
            "max_model_len": 2,
        },
        {
            "num_blocks": 2,
            "block_size": 16,
            "max_num_seqs": 9,
            "max_num_batched_tokens": 25,
            "max_model_len": 64,
        },
        {
            "num_blocks": 90,
            "block_size": 4,
            "max_num_seqs": 5,
            "max_num_batched_tokens": 96,
            "max_model_len": 128,
        },
    ],
)
def test_a_shard_warms_up_for_any_configuration(
    executor: StepExecutor, sizes: dict[str, Any], on_gpu: bool
) -> None:
    request = ConfigureRequest(epoch=1, **sizes)
    executor.configure(request)

    commands = warm_up.commands(request, on_gpu)
    for command in commands:
        executor.execute(command).to_proto()
        executor.execute(ExecuteRequest(leaves=_taken(command)))

    most = max(len(command.scheduled) for command in commands)
    assert most == min(sizes["max_num_seqs"], sizes["num_blocks"])
    tokens = [sum(one.num_tokens for one in command.scheduled) for command in commands]
    room = min(sizes["num_blocks"] * sizes["block_size"], sizes["max_model_len"] - 1)
    assert max(tokens) >= min(sizes["max_num_batched_tokens"], room)


def _taken(command: ExecuteRequest) -> list[int]:
    targets = [target.slot for fork in command.forks for target in fork.targets]
    return [join.slot for join in command.joins] + targets


def test_an_equal_configuration_warms_up_once(
    executor: StepExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: dict[str, Any] = {
        "num_blocks": 8,
        "block_size": 4,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 16,
    }
    executor.configure(ConfigureRequest(epoch=1, max_model_len=32, **sizes))
    monkeypatch.setattr(executor, "execute", None)

    assert executor.configure(ConfigureRequest(epoch=2, max_model_len=32, **sizes))
