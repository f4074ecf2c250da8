"""The work is what docs/performance.md says, and the same for everybody."""

from statistics import fmean, median

import pytest

from benchmarks import workload
from benchmarks.shard_alone import limits_for, record

VOCAB_SIZE = 49_152


def test_a_seed_gives_one_set_of_requests() -> None:
    assert workload.offline(VOCAB_SIZE) == workload.offline(VOCAB_SIZE)
    assert workload.offline(VOCAB_SIZE) != workload.offline(VOCAB_SIZE, seed=1)


def test_the_offline_set_is_that_of_the_page() -> None:
    work = workload.offline(VOCAB_SIZE)

    assert len(work) == 64
    assert all(64 <= len(request.prompt) <= 192 and 32 <= request.max_tokens <= 160 for request in work)
    assert all(workload.FIRST_TOKEN_ID <= token < VOCAB_SIZE for token in work[0].prompt)


def test_outputs_are_long_tailed() -> None:
    outputs = [request.max_tokens for request in workload.long_tailed(VOCAB_SIZE)]

    assert len(outputs) == 512
    assert median(outputs) == pytest.approx(128, rel=0.15)
    assert max(outputs) == 2048
    assert fmean(outputs) > 1.5 * median(outputs)


def test_arrivals_have_their_rate() -> None:
    arriving = workload.poisson(workload.make([(4, 1)] * 2000, VOCAB_SIZE), rate=5.0)

    assert 2000 / arriving[-1].arrival_s == pytest.approx(5.0, rel=0.1)


def test_short_requests_arrive_behind_the_long_prompt() -> None:
    long, *shorts = workload.beside_a_long_prompt(VOCAB_SIZE, 600, 3, rate=10.0)

    assert (len(long.prompt), long.arrival_s) == (600, 0)
    assert all(len(short.prompt) < 64 and short.arrival_s > 0 for short in shorts)


def test_recorded_steps_compute_each_token_once() -> None:
    work = workload.offline(VOCAB_SIZE)

    steps = record(work, limits_for(work, VOCAB_SIZE, "cpu"))

    prompts = sum(len(request.prompt) for request in work)
    outputs = workload.output_tokens(work)
    assert sum(step.num_rows for step in steps) >= outputs
    # An output's last token is computed only where a step was in flight when the request ended.
    assert prompts + outputs - len(work) <= sum(step.num_tokens for step in steps) <= prompts + outputs
    assert max(step.num_tokens for step in steps) <= 256
