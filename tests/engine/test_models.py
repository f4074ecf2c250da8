"""Scheduler and shard together on tiny random models: greedy output equals that of `transformers`."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from pagoda.v1.sampling_pb2 import SamplingParams
from tests.engine.inprocess import GREEDY, Generated, InProcessShard, engine_on, generate, request
from tests.oracle import oracle_logits, random_tokens, tiny_model
from tests.shard.test_models import MODELS

PROMPT_LENGTHS = (1, 2, 15, 16, 17, 31, 32, 40)
# A pool of 9 blocks of 16: two of the longest outputs at most, so that requests are preempted.
SMALL_POOL = {"num_gpu_blocks_override": 9, "max_num_seqs": 8, "max_num_batched_tokens": 32}


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """Greedy continuation without a KV cache: the definition, one whole pass per token."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(oracle_logits(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("name", [name for name in MODELS if name != "llama-dynamic"])
async def test_greedy_tokens_equal_those_of_transformers_under_preemption(name: str, tmp_path: Path) -> None:
    family, config = MODELS[name]
    model = tiny_model(tmp_path, family, **config)
    prompts = {f"r{n}": random_tokens(n, seed=n) for n in PROMPT_LENGTHS}

    async with engine_on(InProcessShard(tmp_path), **SMALL_POOL) as engine:
        results = await generate(engine, [request(key, prompt, 24) for key, prompt in prompts.items()])
        assert engine.scheduler
        assert engine.scheduler.totals.preemptions > 0

    for key, prompt in prompts.items():
        assert results[key].token_ids == greedy(model, prompt, 24), key


@pytest.mark.parametrize("name", ["llama", "mistral-sliding"])
async def test_padded_decodes_change_no_token(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CUDA graph's work, done by calling it. The packed decoder of CPUs knows no padding."""
    monkeypatch.setattr("kernels.cpu.library.load", lambda: None)
    family, config = MODELS[name]
    model = tiny_model(tmp_path, family, **config)
    prompts = {f"r{n}": random_tokens(n, seed=n) for n in PROMPT_LENGTHS}
    shard = InProcessShard(tmp_path, start_capture=lambda: lambda work: work)

    async with engine_on(shard, **SMALL_POOL) as engine:
        results = await generate(engine, [request(key, prompt, 24) for key, prompt in prompts.items()])
        assert engine.scheduler
        assert engine.scheduler.totals.preemptions > 0

    for key, prompt in prompts.items():
        assert results[key].token_ids == greedy(model, prompt, 24), key


async def test_dynamic_rope_scales_by_the_served_length(tmp_path: Path) -> None:
    """`transformers` scales by the length at hand, so the two agree on sequences as long as is served."""
    family, config = MODELS["llama-dynamic"]
    model = tiny_model(tmp_path, family, **config)
    prompts = {f"r{n}": random_tokens(n, seed=n) for n in PROMPT_LENGTHS}

    async with engine_on(InProcessShard(tmp_path), max_model_len=48, **SMALL_POOL) as engine:
        submits = [request(key, prompt, 48 - len(prompt)) for key, prompt in prompts.items()]
        results = await generate(engine, submits)

    for key, prompt in prompts.items():
        tokens = prompt + results[key].token_ids
        assert len(tokens) == 48
        best = oracle_logits(model, tokens).argmax(-1).tolist()
        assert results[key].token_ids == best[len(prompt) - 1 : -1], key


async def test_logprobs_equal_those_of_transformers(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    sampling = SamplingParams(temperature=0.8, top_p=1, repetition_penalty=1, seed=3, logprobs=5)
    prompts = {f"r{n}": random_tokens(n, seed=n) for n in PROMPT_LENGTHS}

    async with engine_on(InProcessShard(tmp_path), **SMALL_POOL) as engine:
        submits = [request(key, prompt, 20, sampling) for key, prompt in prompts.items()]
        results = await generate(engine, submits)

    for key, prompt in prompts.items():
        result = results[key]
        assert len(result.logprobs) == len(result.token_ids) == 20
        reference = oracle_logits(model, prompt + result.token_ids).log_softmax(-1)
        for offset, (token, position) in enumerate(zip(result.token_ids, result.logprobs, strict=True)):
            expected = reference[len(prompt) - 1 + offset]
            assert position.chosen.token_id == token
            assert position.chosen.logprob == pytest.approx(float(expected[token]), abs=1e-4)
            top = expected.topk(5)
            assert [one.token_id for one in position.top] == top.indices.tolist()
            assert [one.logprob for one in position.top] == pytest.approx(top.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("n", [1, 3])
async def test_prompt_logprobs_equal_those_of_transformers(tmp_path: Path, n: int) -> None:
    model = tiny_model(tmp_path)
    prompts = {f"r{length}": random_tokens(length, seed=length) for length in PROMPT_LENGTHS}

    async with engine_on(InProcessShard(tmp_path), **SMALL_POOL) as engine:
        submits = [request(key, prompt, 20 // n, n=n, prompt_logprobs=5) for key, prompt in prompts.items()]
        results = await generate(engine, submits)
        assert engine.scheduler
        assert engine.scheduler.totals.preemptions > 0

    for key, prompt in prompts.items():
        reference = oracle_logits(model, prompt).log_softmax(-1)
        positions = results[key].prompt_logprobs
        for row, token, position in zip(reference[:-1], prompt[1:], positions, strict=True):
            assert position.chosen.token_id == token
            assert position.chosen.logprob == pytest.approx(float(row[token]), abs=1e-4)
            top = row.topk(5)
            assert [one.token_id for one in position.top] == top.indices.tolist()
            assert [one.logprob for one in position.top] == pytest.approx(top.values.tolist(), abs=1e-4)


async def test_a_seed_gives_the_same_tokens_alone_in_a_batch_and_after_preemption(tmp_path: Path) -> None:
    tiny_model(tmp_path)
    shard = InProcessShard(tmp_path)

    def sampled(name: str, seed: int) -> Any:
        params = SamplingParams(
            temperature=1.2,
            top_p=0.9,
            top_k=60,
            min_p=0.01,
            presence_penalty=0.3,
            frequency_penalty=0.2,
            repetition_penalty=1.1,
            seed=seed,
        )
        return request(name, random_tokens(7 + seed % 20, seed=seed), 30, params)

    submits = [sampled(f"r{seed}", seed) for seed in range(32)]
    async with engine_on(shard, num_gpu_blocks_override=256) as engine:
        alone: dict[str, Generated] = {}
        for submit in submits[:6]:
            alone |= await generate(engine, [submit])
        together = await generate(engine, submits)
    async with engine_on(shard, **SMALL_POOL) as engine:
        preempted = await generate(engine, submits)
        assert engine.scheduler
        assert engine.scheduler.totals.preemptions > 0

    for name, result in alone.items():
        assert result.token_ids == together[name].token_ids, name
    for name, result in together.items():
        assert result.token_ids == preempted[name].token_ids, name
    assert len({tuple(result.token_ids) for result in together.values()}) == 32


async def test_requests_of_every_kind_share_a_step(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    prompt = random_tokens(9)
    sampling = SamplingParams(temperature=1, top_p=0.5, repetition_penalty=1, seed=1, logprobs=0)

    async with engine_on(InProcessShard(tmp_path), num_gpu_blocks_override=64) as engine:
        results = await generate(
            engine, [request("greedy", prompt, 20, GREEDY), request("sampled", prompt, 20, sampling)]
        )

    assert results["greedy"].token_ids == greedy(model, prompt, 20)
    assert not results["greedy"].logprobs
    assert [len(position.top) for position in results["sampled"].logprobs] == [0] * 20


async def test_bf16_tokens_are_within_tolerance_of_the_best(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    in_bf16 = copy.deepcopy(model).to(torch.bfloat16)
    prompts = {f"r{n}": random_tokens(n, seed=n) for n in PROMPT_LENGTHS}

    async with engine_on(InProcessShard(tmp_path, torch.bfloat16), **SMALL_POOL) as engine:
        results = await generate(engine, [request(key, prompt, 24) for key, prompt in prompts.items()])

    for key, prompt in prompts.items():
        tokens = results[key].token_ids
        reference = oracle_logits(model, prompt + tokens)[len(prompt) - 1 : -1]
        rounded = oracle_logits(in_bf16, prompt + tokens)[len(prompt) - 1 : -1]
        chosen = reference[torch.arange(len(tokens)), torch.tensor(tokens)]
        # With logits off by e at most, the token taken is within 2 e of the best; e is what transformers
        # itself loses in bf16, and ours may be half as much again.
        assert (reference.max(-1).values - chosen).max() < 3 * (rounded - reference).abs().max()


async def test_weights_that_are_not_finite_fail_the_request_and_not_the_engine(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    with torch.no_grad():
        model.model.embed_tokens.weight[7] = float("nan")
    model.save_pretrained(tmp_path)

    async with engine_on(InProcessShard(tmp_path), num_gpu_blocks_override=64) as engine:
        results = await generate(engine, [request("bad", [3, 7, 9], 5), request("good", [3, 8, 9], 5)])

    assert results["bad"].refused
    assert "not finite" in results["bad"].refused.message
    assert len(results["good"].token_ids) == 5
