"""One model on two tensor-parallel ranks, each a process of its own."""

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.client import Answer, spec
from tests.e2e.stack import Stack, launched, until

pytestmark = pytest.mark.e2e

LENGTH = 600


@pytest.fixture(scope="module")
def alone(tiny_model_folder: Path) -> list[list[int]]:
    """What one process makes of the requests."""
    with launched(f"--model={tiny_model_folder}", "--dtype=float32") as stack:
        stack.wait_ready()
        return tokens(stack)


@pytest.fixture
def ranks(tiny_model_folder: Path) -> Iterator[Stack]:
    with launched(f"--model={tiny_model_folder}", "--dtype=float32", "--tensor-parallel-size=2") as stack:
        stack.wait_ready()
        yield stack


def answers(stack: Stack, channel: object) -> list[Answer]:
    """Greedy and drawn, at the same time."""
    stub = stack.stub(channel)  # type: ignore[arg-type]
    requests = [
        spec(f"Request {index}", LENGTH, temperature=index % 2, seed=index, ignore_eos=True)
        for index in range(4)
    ]
    return [Answer(stub, request) for request in requests]


def tokens(stack: Stack) -> list[list[int]]:
    with stack.channel() as channel:
        return [answer.finish().token_ids for answer in answers(stack, channel)]


def test_two_ranks_give_the_tokens_of_one_process(ranks: Stack, alone: list[list[int]]) -> None:
    assert tokens(ranks) == alone
    assert [*ranks.metrics] == ["router", "scheduler", "shard-0", "shard-1"]
    until(lambda: ranks.used_blocks() == 0)


@pytest.mark.parametrize("victim", ["shard-0", "shard-1"])
def test_a_killed_rank_is_a_pause_without_a_lost_or_changed_token(
    ranks: Stack, alone: list[list[int]], victim: str
) -> None:
    with ranks.channel() as channel:
        running = [answer.read(10) for answer in answers(ranks, channel)]

        ranks.children()[victim].kill()

        assert [answer.finish().token_ids for answer in running] == alone
    assert ranks.wait_line(rf"{victim} ended \(killed by SIGKILL\); restart 1 of 5")
    until(lambda: ranks.used_blocks() == 0)


def test_a_rank_that_hangs_for_a_while_is_a_pause(ranks: Stack, alone: list[list[int]]) -> None:
    with ranks.channel() as channel:
        running = [answer.read(10) for answer in answers(ranks, channel)]
        hanging: psutil.Process = ranks.children()["shard-1"]

        hanging.suspend()
        # Both steps in flight need it.
        until(lambda: ranks.metric("scheduler", "pagoda_scheduler_running_sequences") == 4)
        hanging.resume()

        assert [answer.finish().token_ids for answer in running] == alone


def test_a_model_that_cant_be_divided_ends_the_start(tiny_model_folder: Path) -> None:
    with launched(f"--model={tiny_model_folder}", "--tensor-parallel-size=3") as stack:
        assert stack.wait_line("--tensor-parallel-size 3 doesn't divide num_attention_heads 4")
        assert stack.process.wait(30) == 2
