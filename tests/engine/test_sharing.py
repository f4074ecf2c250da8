"""Parallel sampling, beam search, prefix cache and swap on a real model: sharing memory changes no output."""

from pathlib import Path
from typing import Any

import pytest
import torch

from pagoda.v1.inference_pb2 import BeamSearch
from pagoda.v1.sampling_pb2 import SamplingParams
from tests.engine.inprocess import InProcessShard, engine_on, generate, request
from tests.engine.test_models import greedy
from tests.oracle import random_tokens, tiny_model

EOS = 2
SMALL_POOL = {"num_gpu_blocks_override": 16, "max_num_seqs": 12, "max_num_batched_tokens": 32}
PREEMPTING: dict[str, dict[str, Any]] = {
    "recompute": {**SMALL_POOL, "preemption_mode": "recompute"},
    "swap": {**SMALL_POOL, "preemption_mode": "swap", "swap_space": 0.01},
    "auto": {**SMALL_POOL, "swap_space": 0.01},
    "uncached": {**SMALL_POOL, "preemption_mode": "recompute", "enable_prefix_caching": False},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("sharing")
    model = tiny_model(folder)
    model.folder = folder
    return model


@pytest.fixture(scope="module")
def shard(model: Any) -> InProcessShard:
    folder: Path = model.folder
    return InProcessShard(folder)


def sampled(name: str, length: int, n: int, seed: int) -> Any:
    params = SamplingParams(temperature=1, top_p=0.95, repetition_penalty=1, seed=seed)
    return request(name, random_tokens(length, seed=seed), 25, params, n=n)


@pytest.mark.parametrize("mode", PREEMPTING)
async def test_outputs_of_one_prompt_are_the_same_whatever_was_preempted(
    shard: InProcessShard, mode: str
) -> None:
    submits = [sampled(f"r{index}", 10 + 7 * index, 3, index) for index in range(5)]
    async with engine_on(shard, num_gpu_blocks_override=256) as engine:
        free = await generate(engine, submits)
        assert engine.scheduler
        assert engine.scheduler.totals.copies > 0
    async with engine_on(shard, **PREEMPTING[mode]) as engine:
        pressed = await generate(engine, submits)
        assert engine.scheduler
        totals = engine.scheduler.totals
        assert totals.recomputes if mode in ("recompute", "uncached") else totals.swapped_in

    for name, result in free.items():
        assert len(result.outputs) == 3
        assert len({tuple(tokens) for tokens in result.outputs.values()}) == 3
        assert pressed[name].outputs == result.outputs, name


async def test_one_output_is_the_same_alone_and_among_others(shard: InProcessShard) -> None:
    async with engine_on(shard, num_gpu_blocks_override=256) as engine:
        several = await generate(engine, [sampled("several", 20, 4, seed=3)])
        alone = await generate(engine, [sampled("alone", 20, 1, seed=3)])

    assert several["several"].outputs[0] == alone["alone"].outputs[0]


BEAMS = [
    BeamSearch(beam_width=2, length_penalty=1),
    BeamSearch(beam_width=4, length_penalty=1),
    BeamSearch(beam_width=4, length_penalty=0),
    BeamSearch(beam_width=3, length_penalty=2, early_stopping=True),
    BeamSearch(beam_width=5, length_penalty=-1),
    BeamSearch(beam_width=1, length_penalty=1),
]


@torch.no_grad()
def transformers_beams(
    model: Any, prompt: list[int], search: BeamSearch, n: int, stop: list[int], min_tokens: int = 0
) -> Any:
    return model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        num_beams=search.beam_width,
        num_return_sequences=n,
        length_penalty=search.length_penalty,
        early_stopping=search.early_stopping,
        max_new_tokens=14,
        min_new_tokens=min_tokens,
        do_sample=False,
        eos_token_id=stop,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )


@pytest.mark.parametrize("mode", ["free", *PREEMPTING])
async def test_beam_search_equals_that_of_transformers(shard: InProcessShard, model: Any, mode: str) -> None:
    # Tokens that come up often enough to end some hypotheses early.
    stop = [EOS, *range(100, 130)]
    searches = {f"{index}": (BEAMS[index % len(BEAMS)], 5 + 6 * index) for index in range(9)}
    submits = [
        request(
            name,
            random_tokens(length, seed=length),
            14,
            stop=stop,
            n=min(2, search.beam_width),
            beam_search=search,
        )
        for name, (search, length) in searches.items()
    ]
    options = {"num_gpu_blocks_override": 256} if mode == "free" else PREEMPTING[mode]
    async with engine_on(shard, **options) as engine:
        results = await generate(engine, submits)
        assert engine.scheduler
        assert (engine.scheduler.totals.preemptions > 0) == (mode != "free")

    ended_early = 0
    for name, (search, length) in searches.items():
        n = min(2, search.beam_width)
        if search.beam_width == 1:
            expected = greedy(model, random_tokens(length, seed=length), 14)
            ended = next((i for i, token in enumerate(expected) if token in stop), 13)
            assert results[name].outputs == {0: expected[: ended + 1]}
            continue
        reference = transformers_beams(model, random_tokens(length, seed=length), search, n, stop)
        for index in range(n):
            tokens = reference.sequences[index, length:].tolist()
            ended = next((i for i, token in enumerate(tokens) if token in stop), 13)
            ended_early += ended < 13
            assert results[name].outputs[index] == tokens[: ended + 1], (name, index)
            score = float(reference.sequences_scores[index])
            assert results[name].scores[index] == pytest.approx(score, abs=1e-4)
    assert ended_early > 3


@pytest.mark.parametrize("min_tokens", [1, 6, 14])
async def test_beams_end_after_min_tokens(shard: InProcessShard, model: Any, min_tokens: int) -> None:
    stop = [EOS, *range(100, 130)]
    search, prompt = BeamSearch(beam_width=4, length_penalty=1), random_tokens(9, seed=9)
    async with engine_on(shard, num_gpu_blocks_override=64) as engine:
        submit = request("a", prompt, 14, stop=stop, n=2, beam_search=search, min_tokens=min_tokens)
        outputs = (await generate(engine, [submit]))["a"].outputs

    reference = transformers_beams(model, prompt, search, 2, stop, min_tokens)
    for index, output in outputs.items():
        assert len(output) > min_tokens or len(output) == 14
        assert output == reference.sequences[index, 9 : 9 + len(output)].tolist()


@pytest.mark.parametrize("mode", PREEMPTING)
async def test_biases_and_min_tokens_outlast_a_preemption(shard: InProcessShard, mode: str) -> None:
    def biased(index: int) -> Any:
        params = SamplingParams(temperature=1, top_p=1, repetition_penalty=1, seed=index)
        # A stop token that would be sampled at once, and one that would not.
        params.logit_bias[7] = 100
        params.logit_bias[9] = -100
        prompt = random_tokens(10 + 7 * index, seed=index)
        return request(f"r{index}", prompt, 30, params, stop=[7], n=3, min_tokens=20)

    async with engine_on(shard, **PREEMPTING[mode]) as engine:
        results = await generate(engine, [biased(index) for index in range(5)])
        assert engine.scheduler
        assert engine.scheduler.totals.preemptions > 0

    outputs = [output for result in results.values() for output in result.outputs.values()]
    assert len(outputs) == 15
    assert all(len(output) == 21 and output.index(7) == 20 and 9 not in output for output in outputs)


async def test_a_shared_prefix_is_computed_once(shard: InProcessShard, model: Any) -> None:
    system = random_tokens(64, seed=1)
    prompts = {f"r{index}": [*system, *random_tokens(3 + index, seed=index)] for index in range(10)}
    submits = [request(name, prompt, 8) for name, prompt in prompts.items()]
    async with engine_on(shard, num_gpu_blocks_override=256, max_num_batched_tokens=128) as engine:
        results = await generate(engine, submits)
        assert engine.scheduler
        hits = engine.scheduler.totals.hit_tokens

    assert hits == 9 * 64
    assert sorted(result.cached_tokens for result in results.values()) == [0] + [64] * 9
    for name, prompt in prompts.items():
        assert results[name].token_ids == greedy(model, prompt, 8), name


async def test_generated_tokens_are_found_too(shard: InProcessShard, model: Any) -> None:
    """The second turn of a conversation repeats the first one's answer."""
    prompt = random_tokens(20, seed=4)
    async with engine_on(shard, num_gpu_blocks_override=64) as engine:
        first = (await generate(engine, [request("first", prompt, 30)]))["first"]
        turn = [*prompt, *first.token_ids, 7, 8]
        second = (await generate(engine, [request("second", turn, 10)]))["second"]

    # 49 of the 50 tokens were computed: three full blocks.
    assert second.cached_tokens == 48
    assert second.token_ids == greedy(model, turn, 10)


async def test_without_prefix_caching_nothing_is_found(shard: InProcessShard, model: Any) -> None:
    prompt = random_tokens(40, seed=4)
    async with engine_on(shard, num_gpu_blocks_override=64, enable_prefix_caching=False) as engine:
        await generate(engine, [request("first", prompt, 5)])
        second = (await generate(engine, [request("second", prompt, 5)]))["second"]

    assert second.cached_tokens == 0
    assert second.token_ids == greedy(model, prompt, 5)


async def test_a_prompt_that_is_all_there_still_computes_its_last_token(
    shard: InProcessShard, model: Any
) -> None:
    prompt = random_tokens(48, seed=4)
    async with engine_on(shard, num_gpu_blocks_override=64) as engine:
        await generate(engine, [request("first", prompt, 20)])
        second = (await generate(engine, [request("second", prompt, 20)]))["second"]

    assert second.cached_tokens == 32
    assert second.token_ids == greedy(model, prompt, 20)
