"""Step commands, one by one, as the contract states them."""

from typing import Any

import pytest
import torch

from pagoda.shard.v1.shard_pb2 import (
    BlockCopy,
    BlockUpdate,
    ConfigureRequest,
    ExecuteRequest,
    Fork,
    Join,
    NextToken,
    Scheduled,
)
from pagoda.v1.sampling_pb2 import SamplingParams
from shard.executor import StepError, StepExecutor
from tests.oracle import oracle_logits, random_tokens

GREEDY = SamplingParams(temperature=0, top_p=1, repetition_penalty=1)
PROMPT = random_tokens(10, seed=5)


def configure(executor: StepExecutor, **fields: int) -> bool:
    sizes: dict[str, Any] = {
        "epoch": 1,
        "num_blocks": 8,
        "block_size": 4,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 16,
        "max_model_len": 32,
    }
    return executor.configure(ConfigureRequest(**{**sizes, **fields}))


def join(slot: int, tokens: list[int], blocks: list[int], computed: int = 0) -> Join:
    return Join(
        slot=slot,
        token_ids=tokens,
        prompt_length=len(tokens),
        computed_length=computed,
        block_ids=blocks,
        sampling=GREEDY,
    )


def step(executor: StepExecutor, **fields: Any) -> dict[int, int]:
    """Runs one command; sampled tokens by slot."""
    counts = fields.pop("counts", {})
    scheduled = [Scheduled(slot=slot, num_tokens=count) for slot, count in counts.items()]
    response = executor.execute(ExecuteRequest(scheduled=scheduled, **fields)).to_proto()
    return {sampled.slot: sampled.token_id for sampled in response.sampled}


def best(reference: Any, tokens: list[int]) -> int:
    return int(oracle_logits(reference, tokens)[-1].argmax())


def test_only_the_chunk_that_reaches_the_last_token_samples(executor: StepExecutor, reference: Any) -> None:
    configure(executor)

    assert step(executor, joins=[join(0, PROMPT, [3, 1, 6])], counts={0: 7}) == {}
    assert step(executor, counts={0: 3}) == {0: best(reference, PROMPT)}


def test_a_decode_goes_on_with_the_token_that_the_shard_sampled(
    executor: StepExecutor, reference: Any
) -> None:
    configure(executor)
    first = step(executor, joins=[join(1, PROMPT, [0, 1, 2])], counts={1: 10})[1]

    second = step(executor, counts={1: 1})[1]

    assert second == best(reference, [*PROMPT, first])


def test_blocks_are_appended_before_they_are_needed(executor: StepExecutor, reference: Any) -> None:
    configure(executor)
    first = step(executor, joins=[join(0, PROMPT[:4], [5])], counts={0: 4})[0]

    second = step(executor, block_updates=[BlockUpdate(slot=0, start=1, block_ids=[2])], counts={0: 1})[0]

    assert second == best(reference, [*PROMPT[:4], first])


def test_a_slot_and_its_blocks_can_change_hands_within_one_command(
    executor: StepExecutor, reference: Any
) -> None:
    configure(executor)
    step(executor, joins=[join(0, PROMPT, [0, 1, 2])], counts={0: 10})
    other = random_tokens(9, seed=6)

    result = step(executor, leaves=[0], joins=[join(0, other, [2, 0, 1])], counts={0: 9})

    assert result == {0: best(reference, other)}


def test_computed_blocks_are_read_and_not_written(executor: StepExecutor, reference: Any) -> None:
    configure(executor)
    step(executor, joins=[join(0, PROMPT, [0, 1, 2])], counts={0: 10})

    result = step(executor, joins=[join(1, PROMPT, [0, 1, 3], computed=8)], counts={1: 2})

    assert result == {1: best(reference, PROMPT)}


def test_two_sequences_share_a_block_that_the_same_step_fills(executor: StepExecutor, reference: Any) -> None:
    configure(executor)
    other = [*PROMPT[:4], 9, 9]

    result = step(
        executor,
        joins=[join(0, PROMPT[:4], [0]), join(1, other, [0, 1], computed=4)],
        counts={0: 4, 1: 2},
    )

    assert result == {0: best(reference, PROMPT[:4]), 1: best(reference, other)}


def test_a_copied_block_diverges_from_its_source(executor: StepExecutor, reference: Any) -> None:
    configure(executor)
    step(executor, joins=[join(0, PROMPT[:6], [0, 1])], counts={0: 6})
    forked = join(1, [*PROMPT[:6], 77], [0, 5], computed=6)

    result = step(executor, joins=[forked], copies=[BlockCopy(source=1, destination=5)], counts={0: 1, 1: 1})

    sampled = best(reference, PROMPT[:6])
    assert result == {
        0: best(reference, [*PROMPT[:6], sampled]),
        1: best(reference, [*PROMPT[:6], 77]),
    }


def test_a_fork_samples_from_its_sources_logits_and_goes_its_own_way(
    executor: StepExecutor, reference: Any
) -> None:
    configure(executor)
    copy = join(2, [], [0, 1, 2], computed=10)
    copy.prompt_length = 10

    first = step(
        executor,
        joins=[join(0, PROMPT, [0, 1, 2])],
        counts={0: 10},
        forks=[Fork(source_slot=0, targets=[copy])],
    )
    second = step(
        executor,
        block_updates=[BlockUpdate(slot=2, start=2, block_ids=[6])],
        copies=[BlockCopy(source=2, destination=6)],
        next_tokens=[NextToken(slot=2, token_id=77)],
        counts={0: 1, 2: 1},
    )

    sampled = best(reference, PROMPT)
    assert first == {0: sampled, 2: sampled}
    assert second == {0: best(reference, [*PROMPT, sampled]), 2: best(reference, [*PROMPT, 77])}


def test_swapped_blocks_come_back_elsewhere_as_they_were(executor: StepExecutor, reference: Any) -> None:
    configure(executor, num_host_blocks=3)
    first = step(executor, joins=[join(0, PROMPT, [0, 1, 2])], counts={0: 10})[0]
    outs = [BlockCopy(source=block, destination=2 - block) for block in range(3)]
    other = random_tokens(12, seed=9)

    # The blocks are given out again in the command that saves them.
    step(executor, leaves=[0], swap_outs=outs, joins=[join(1, other, [2, 1, 0])], counts={1: 12})
    ins = [BlockCopy(source=2 - block, destination=5 + block) for block in range(3)]
    back = join(0, [*PROMPT, first], [5, 6, 7], computed=10)
    result = step(executor, swap_ins=ins, joins=[back], counts={0: 1})

    assert result == {0: best(reference, [*PROMPT, first])}


def test_a_beam_gets_its_likeliest_continuations(executor: StepExecutor, reference: Any) -> None:
    configure(executor)
    beam = join(0, PROMPT, [0, 1, 2])
    beam.num_candidates = 5

    command = ExecuteRequest(joins=[beam], scheduled=[Scheduled(slot=0, num_tokens=10)])
    (sampled,) = executor.execute(command).to_proto().sampled

    expected = oracle_logits(reference, PROMPT)[-1].log_softmax(-1).topk(5)
    assert [c.token_id for c in sampled.candidates] == expected.indices.tolist()
    assert [c.logprob for c in sampled.candidates] == pytest.approx(expected.values.tolist(), abs=1e-4)
    assert not sampled.HasField("logprobs")


def test_a_logit_bias_steers_its_own_slot(executor: StepExecutor, reference: Any) -> None:
    configure(executor)
    biased = join(1, PROMPT, [3, 4, 5])
    biased.sampling.logit_bias[42] = 100

    result = step(executor, joins=[join(0, PROMPT, [0, 1, 2]), biased], counts={0: 10, 1: 6})
    result |= step(executor, counts={1: 4})

    assert result == {0: best(reference, PROMPT), 1: 42}


def test_stop_tokens_are_sampled_from_min_tokens_on(executor: StepExecutor, reference: Any) -> None:
    """Also where a sequence joins anew with its output, or begins as a fork."""
    configure(executor, max_num_seqs=4, num_blocks=9, max_num_batched_tokens=32)
    logits = oracle_logits(reference, PROMPT)[-1]
    stop, second = logits.topk(2).indices.tolist()
    joins = [join(slot, PROMPT, [*range(3 * slot, 3 * slot + 3)]) for slot in range(3)]
    for message, prompt_length, min_tokens in zip(joins, (10, 8, 8), (1, 2, 3), strict=True):
        message.prompt_length, message.min_tokens = prompt_length, min_tokens
        message.stop_token_ids.append(stop)
    target = join(3, [], [3, 4, 5], computed=10)
    target.prompt_length, target.min_tokens = 10, 1
    target.stop_token_ids.append(stop)
    forks = [Fork(source_slot=1, targets=[target])]

    result = step(executor, joins=joins, counts={0: 10, 1: 10, 2: 10}, forks=forks)

    assert result == {0: second, 1: stop, 2: second, 3: second}


def test_an_override_replaces_the_sampled_token(executor: StepExecutor, reference: Any) -> None:
    configure(executor)
    step(executor, joins=[join(0, PROMPT, [0, 1, 2])], counts={0: 10})

    result = step(executor, next_tokens=[NextToken(slot=0, token_id=42)], counts={0: 1})

    assert result == {0: best(reference, [*PROMPT, 42])}


def test_a_matching_allocation_is_kept_and_slots_are_not(executor: StepExecutor) -> None:
    assert not configure(executor, epoch=1)
    step(executor, joins=[join(0, PROMPT, [0, 1, 2])], counts={0: 10})

    assert configure(executor, epoch=2)
    with pytest.raises(StepError, match="slot 0 is empty"):
        step(executor, counts={0: 1})

    assert not configure(executor, epoch=3, num_blocks=9)


def test_nothing_scheduled_is_no_error(executor: StepExecutor) -> None:
    configure(executor)

    assert step(executor) == {}


@pytest.mark.parametrize(
    "fields",
    [
        {"leaves": [0]},
        {"counts": {2: 1}},
        {"joins": [join(3, PROMPT, [0, 1, 2])]},
        {"joins": [join(0, PROMPT, [0, 1, 2]), join(0, PROMPT, [3, 4, 5])]},
        {"joins": [join(0, PROMPT, [0, 1, 8])]},
        {"joins": [join(0, PROMPT, [*range(8), 0])]},
        {"joins": [join(0, PROMPT, [0, 1, 2], computed=10)]},
        {"joins": [join(0, [1] * 33, [])]},
        {"joins": [join(0, [1] * 32, list(range(8)))], "counts": {0: 32}},
        {"joins": [join(0, PROMPT, [0, 1])], "counts": {0: 10}},
        {"joins": [join(0, PROMPT, [0, 1, 2])], "counts": {0: 11}},
        {"joins": [join(0, PROMPT, [0, 1, 2])], "counts": {0: 0}},
        {
            "joins": [join(0, PROMPT, [0, 1, 2])],
            "block_updates": [BlockUpdate(slot=0, start=4, block_ids=[5])],
        },
        {
            "joins": [join(0, PROMPT, [0, 1, 2])],
            "counts": {0: 4},
            "forks": [Fork(source_slot=0, targets=[join(1, [], [0, 1, 2])])],
        },
        {
            "joins": [join(0, PROMPT, [0, 1, 2])],
            "counts": {0: 10},
            "forks": [Fork(source_slot=0, targets=[join(0, [], [0, 1, 2])])],
        },
    ],
)
def test_a_command_that_contradicts_the_slots_is_an_error(
    executor: StepExecutor, fields: dict[str, Any]
) -> None:
    configure(executor)

    with pytest.raises(StepError):
        step(executor, **fields)


def test_the_default_pool_on_a_cpu_is_a_quarter_of_memory_and_at_most_4_gib(executor: StepExecutor) -> None:
    from shard.kv_cache import capacity_bytes

    cpu = torch.device("cpu")
    assert capacity_bytes(executor.model, cpu, 123, 0.9) == 123
    assert 1 << 28 < capacity_bytes(executor.model, cpu, None, 0.9) <= 4 << 30
