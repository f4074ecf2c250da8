"""Log-probabilities of prompts against `transformers`, however the prompt is cut into chunks."""

from typing import Any

import pytest

from pagoda.shard.v1.shard_pb2 import ExecuteRequest, ExecuteResponse, Join, Scheduled
from shard.executor import StepExecutor
from tests.oracle import oracle_logits, random_tokens
from tests.shard.test_executor import best, configure, join

PROMPT = random_tokens(100, seed=8)
TOP = 3


def asking(slot: int, tokens: list[int], top: int = TOP, computed: int = 0) -> Join:
    """In blocks of 4 tokens, from the slot's own third of the pool on."""
    message = join(slot, tokens, [25 * slot + index for index in range(len(tokens) // 4 + 1)], computed)
    message.prompt_logprobs = top
    return message


def execute(executor: StepExecutor, joins: list[Join], *counts: int) -> ExecuteResponse:
    """The first slots compute so many tokens."""
    scheduled = [Scheduled(slot=slot, num_tokens=count) for slot, count in enumerate(counts)]
    return executor.execute(ExecuteRequest(joins=joins, scheduled=scheduled)).to_proto()


def check(reference: Any, response: ExecuteResponse, slot: int, prompt: list[int], first: int) -> int:
    """Compares a slot's positions, which begin with the token at `first`; returns how many there are."""
    (positions,) = [one.positions for one in response.prompt_logprobs if one.slot == slot]
    logprobs = oracle_logits(reference, prompt).log_softmax(-1)[first - 1 :]
    for position, token, row in zip(positions, prompt[first:], logprobs, strict=False):
        expected = row.topk(TOP)
        assert position.chosen.token_id == token
        assert position.chosen.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert [one.token_id for one in position.top] == expected.indices.tolist()
        assert [one.logprob for one in position.top] == pytest.approx(expected.values.tolist(), abs=1e-4)
    return len(positions)


@pytest.fixture
def roomy(executor: StepExecutor) -> StepExecutor:
    configure(executor, num_blocks=75, max_num_batched_tokens=128, max_model_len=128)
    return executor


@pytest.mark.parametrize("length", [2, 3, 64, 65, 66, 100])
def test_a_whole_prompt_gives_all_but_its_first_token(
    roomy: StepExecutor, reference: Any, length: int
) -> None:
    prompt = PROMPT[:length]

    response = execute(roomy, [asking(0, prompt)], length)

    assert check(reference, response, 0, prompt, 1) == length - 1
    assert response.sampled[0].token_id == best(reference, prompt)


def test_a_chunk_gives_the_tokens_after_those_it_computes(roomy: StepExecutor, reference: Any) -> None:
    first = 1
    for count in (1, 70, 1, 27):
        response = execute(roomy, [asking(0, PROMPT)] if first == 1 else [], count)

        assert check(reference, response, 0, PROMPT, first) == count
        assert not response.sampled
        first += count

    last = execute(roomy, [], 1)
    assert not last.prompt_logprobs
    assert last.sampled[0].token_id == best(reference, PROMPT)


def test_computed_tokens_give_none(roomy: StepExecutor, reference: Any) -> None:
    execute(roomy, [join(0, PROMPT[:20], [*range(6)])], 20)
    again = asking(1, PROMPT[:20], computed=8)
    again.block_ids[:2] = [0, 1]

    response = execute(roomy, [again], 1, 12)

    assert check(reference, response, 1, PROMPT[:20], 9) == 11


def test_rows_beside_each_other_ask_for_their_own(roomy: StepExecutor, reference: Any) -> None:
    other = random_tokens(30, seed=9)
    joins = [asking(0, PROMPT[:10], top=0), join(1, other, [*range(25, 33)]), asking(2, other)]

    response = execute(roomy, joins, 10, 30, 29)

    assert [one.slot for one in response.prompt_logprobs] == [0, 2]
    assert check(reference, response, 2, other, 1) == 29
    assert all(not position.top for position in response.prompt_logprobs[0].positions)
    sampled = {one.slot: one.token_id for one in response.sampled}
    assert sampled == {0: best(reference, PROMPT[:10]), 1: best(reference, other)}


def test_outputs_and_prompts_of_one_token_give_none(roomy: StepExecutor) -> None:
    assert not execute(roomy, [asking(0, PROMPT[:1])], 1).prompt_logprobs
    assert not execute(roomy, [], 1).prompt_logprobs


def test_more_likeliest_tokens_than_there_are_give_all(roomy: StepExecutor) -> None:
    (chunk,) = execute(roomy, [asking(0, PROMPT[:3], top=1000)], 3).prompt_logprobs

    assert [len(position.top) for position in chunk.positions] == [256, 256]
