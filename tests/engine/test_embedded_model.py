"""Real weights: all prompts at once, on a pool too small for them, against `transformers`."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from common.paths import cache_root
from launcher.embedded_model import embedded_gguf
from pagoda.v1.sampling_pb2 import SamplingParams
from shard.gguf_import import cached_import
from tests.engine.inprocess import Generated, InProcessShard, engine_on, generate, request
from tests.oracle import oracle_logits

MAX_TOKENS = 24
TEXT = (
    "A block table maps the logical blocks of a sequence to physical ones, much as a page table does for a "
    "process. When the café 🍵 closed at 23:45, Zoë counted 1,024 pages; none was wasted. "
)
# 1 to 1,000 tokens, block borders among them.
LENGTHS = (1, 2, 3, 5, 8, 15, 16, 17, 31, 32, 33, 48, 64, 100, 127, 128, 129, 255, 512, 777, 1000)
# 80 blocks hold 1,280 tokens; the prompts alone are 3,300.
SMALL_POOL = {"num_gpu_blocks_override": 80, "max_num_seqs": 32, "max_model_len": 2048}


@pytest.fixture(scope="module")
def folder() -> Path:
    return cached_import(embedded_gguf(), cache_root())


@pytest.fixture(scope="module")
def prompts(folder: Path) -> dict[str, list[int]]:
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(TEXT * 20)["input_ids"]
    return {f"{n} tokens": ids[n : 2 * n] for n in LENGTHS}


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def shard(folder: Path) -> InProcessShard:
    return InProcessShard(folder)


async def under_preemption(shard: InProcessShard, submits: list[Any]) -> dict[str, Generated]:
    async with engine_on(shard, **SMALL_POOL) as engine:
        results = await generate(engine, submits)
        assert engine.scheduler
        assert engine.scheduler.totals.preemptions > 0
    return results


async def test_greedy_tokens_equal_those_of_transformers(
    shard: InProcessShard, oracle: Any, prompts: dict[str, list[int]]
) -> None:
    results = await under_preemption(shard, [request(k, p, MAX_TOKENS) for k, p in prompts.items()])

    for key, prompt in prompts.items():
        expected = oracle.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        assert results[key].token_ids == expected, key


async def test_sampled_tokens_and_logprobs_repeat_under_preemption(
    shard: InProcessShard, oracle: Any, prompts: dict[str, list[int]]
) -> None:
    def sampled(key: str, prompt: list[int]) -> Any:
        params = SamplingParams(
            temperature=0.9, top_p=0.95, repetition_penalty=1.1, seed=len(prompt), logprobs=2
        )
        return request(key, prompt, MAX_TOKENS, params)

    short = {key: prompt for key, prompt in prompts.items() if len(prompt) <= 300}
    submits = [sampled(key, prompt) for key, prompt in short.items()]
    async with engine_on(shard, num_gpu_blocks_override=400, max_model_len=2048) as engine:
        together = await generate(engine, submits)
        alone = await generate(engine, submits[7:8])
    async with engine_on(shard, **{**SMALL_POOL, "num_gpu_blocks_override": 30}) as engine:
        preempted = await generate(engine, submits)
        assert engine.scheduler
        assert engine.scheduler.totals.preemptions > 0

    assert {k: r.token_ids for k, r in together.items()} == {k: r.token_ids for k, r in preempted.items()}
    for key, result in alone.items():
        assert result.token_ids == together[key].token_ids
    for key in list(short)[::4]:
        prompt, result = short[key], together[key]
        reference = oracle_logits(oracle, prompt + result.token_ids).log_softmax(-1)[len(prompt) - 1 : -1]
        for row, token, position in zip(reference, result.token_ids, result.logprobs, strict=True):
            assert position.chosen.logprob == pytest.approx(float(row[token]), abs=2e-3)
            assert position.top[0].token_id == int(row.argmax())


async def test_bf16_tokens_are_within_tolerance_of_the_best(
    folder: Path, oracle: Any, prompts: dict[str, list[int]]
) -> None:
    """Within 0.6 of the best float32 logit, where logits spread over about 30: bf16 keeps 8 bits."""
    shard = InProcessShard(folder, torch.bfloat16)
    results = await under_preemption(shard, [request(k, p, MAX_TOKENS) for k, p in prompts.items()])

    worst = 0.0
    for key, prompt in prompts.items():
        tokens = results[key].token_ids
        reference = oracle_logits(oracle, prompt + tokens)[len(prompt) - 1 : -1]
        chosen = reference[torch.arange(len(tokens)), torch.tensor(tokens)]
        worst = max(worst, float((reference.max(-1).values - chosen).max()))
    assert worst < 0.6
