"""With compiled kernels, a sampled token is the same alone, batched, swapped and recomputed."""

from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.cpu import library
from pagoda.v1.sampling_pb2 import SamplingParams
from tests.engine.inprocess import InProcessShard, engine_on, generate, request
from tests.oracle import random_tokens, tiny_model

pytestmark = pytest.mark.skipif(library.load() is None, reason="no compiled kernels for this CPU")

# Each with room for two of the requests; chunks and batches differ from those of a request alone.
SMALL_POOL = {"num_gpu_blocks_override": 16, "max_num_seqs": 12, "max_num_batched_tokens": 32}
PRESSURE: dict[str, dict[str, Any]] = {
    "recompute": {**SMALL_POOL, "preemption_mode": "recompute"},
    "recompute, uncached": {**SMALL_POOL, "preemption_mode": "recompute", "enable_prefix_caching": False},
    "swap": {**SMALL_POOL, "preemption_mode": "swap", "swap_space": 0.01},
}


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def shard(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> InProcessShard:
    folder: Path = tmp_path_factory.mktemp("repeats")
    tiny_model(folder)
    return InProcessShard(folder, request.param)


SUBMITS = [
    request(
        f"r{seed}",
        random_tokens(9 + 7 * seed, seed=seed),
        40,
        SamplingParams(temperature=1, top_p=1, repetition_penalty=1, seed=seed, logprobs=2),
    )
    for seed in range(10)
]


@pytest.mark.parametrize("mode", PRESSURE)
async def test_sampled_tokens_and_logprobs_are_the_same_alone_and_under_pressure(
    shard: InProcessShard, mode: str
) -> None:
    async with engine_on(shard, num_gpu_blocks_override=256, enable_prefix_caching=False) as engine:
        alone = [(await generate(engine, [submit]))[submit.key.request_id] for submit in SUBMITS]
    async with engine_on(shard, **PRESSURE[mode]) as engine:
        pressed = await generate(engine, SUBMITS)
        assert engine.scheduler
        totals = engine.scheduler.totals
        assert totals.swapped_in if mode == "swap" else totals.recomputes

    for submit, one in zip(SUBMITS, alone, strict=True):
        assert len(one.token_ids) == 40
        assert pressed[submit.key.request_id].token_ids == one.token_ids
        # To the last bit.
        assert pressed[submit.key.request_id].logprobs == one.logprobs
