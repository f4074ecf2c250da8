"""The sampler against a plain float64 reference, `transformers`' logits processors, and its own promises."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from shard.logprobs import RowLogprobs
from shard.philox import uniform
from shard.sampler import Bias, SampledToken, SampleResult, SamplingBatch, SamplingParams, sample

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0)


def random_logits(rows: int, vocab: int, seed: int = 0) -> Tensor:
    return 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def bias(values: dict[int, float]) -> Bias:
    return Bias(torch.tensor([*values]), torch.tensor([*values.values()]))


def run(
    logits: Tensor,
    params: list[SamplingParams],
    positions: list[int] | None = None,
    outputs: list[int] | None = None,
    tokens: list[list[int]] | None = None,
    prompts: list[int] | None = None,
    biases: list[dict[int, float]] | None = None,
) -> SampleResult:
    rows = len(params)
    batch = SamplingBatch.build(
        params,
        outputs or [0] * rows,
        positions or [*range(rows)],
        [torch.tensor(row, dtype=torch.int64) for row in tokens or [[]] * rows],
        prompts or [0] * rows,
        [bias(values) if values else None for values in biases or [{}] * rows],
        CPU,
    )
    return sample(logits, batch)


def chosen(logits: Tensor, params: list[SamplingParams], **rest: Any) -> list[int]:
    result: list[int] = run(logits, params, **rest).token_ids.tolist()
    return result


def spread(params: SamplingParams, logits: Tensor, count: int = 4000) -> Tensor:
    """How often each token of `logits` [vocab] is drawn at positions 0 to `count`."""
    drawn = run(logits.expand(count, -1), [params] * count).token_ids
    return torch.bincount(drawn, minlength=logits.shape[-1]) / count


def reference_kept(logits: np.ndarray[Any, Any], params: SamplingParams) -> np.ndarray[Any, Any]:
    """Probabilities after truncation, [vocab] float64, written from the definitions."""
    scaled = (logits - logits.max()) / params.temperature
    probabilities: np.ndarray[Any, Any] = np.exp(scaled)
    probabilities[probabilities < params.min_p] = 0
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if params.top_k:
        probabilities[order[params.top_k :]] = 0
    probabilities /= probabilities.sum()
    before = 0.0
    for rank, token in enumerate(order):
        mass = probabilities[token]
        if rank and before >= params.top_p:
            probabilities[token] = 0
        before += mass
    kept_mass: np.ndarray[Any, Any] = probabilities / probabilities.sum()
    return kept_mass


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**64 - 1),
    vocab=st.integers(1, 300),
    position=st.integers(0, 100_000),
    output=st.integers(0, 100),
    temperature=st.floats(0.05, 100),
    top_p=st.floats(0.01, 1),
    top_k=st.integers(0, 310),
    min_p=st.one_of(st.just(0.0), st.floats(0.001, 1)),
)
def test_draws_by_inverse_cdf_in_token_order(
    seed: int,
    vocab: int,
    position: int,
    output: int,
    temperature: float,
    top_p: float,
    top_k: int,
    min_p: float,
) -> None:
    params = SamplingParams(temperature, top_p, top_k, min_p, seed=seed)
    logits = random_logits(1, vocab, seed % 1000)
    token = chosen(logits, [params], positions=[position], outputs=[output])[0]

    signed = seed - 2**64 if seed >= 2**63 else seed
    drawn = uniform(*(torch.tensor([number]) for number in (signed, output, position))).item()
    # float32 logits shift the borders between tokens, and between kept and dropped, by about 1e-6.
    near = set()
    for slack in (0.9999, 1, 1.0001):
        moved = dataclasses.replace(params, top_p=min(1, top_p * slack), min_p=min(1, min_p / slack))
        cumulative = reference_kept(logits[0].double().numpy(), moved).cumsum()
        near |= {int(np.searchsorted(cumulative, drawn + shift)) for shift in (-1e-4, 0, 1e-4)}
    assert token in near


def test_the_exact_token_at_every_uniform() -> None:
    """Away from borders the reference leaves no choice; few of 3000 draws are near one."""
    logits = random_logits(1, 50)[0]
    count = 3000
    tokens = torch.tensor(chosen(logits.expand(count, -1), [SamplingParams(seed=9)] * count))
    drawn = uniform(torch.full((count,), 9), torch.zeros(count, dtype=torch.int64), torch.arange(count))
    cumulative = logits.double().softmax(-1).cumsum(-1)
    expected = torch.searchsorted(cumulative, drawn, right=True)
    clear = (cumulative.unsqueeze(0) - drawn.unsqueeze(1)).abs().amin(-1) > 1e-6
    assert clear.float().mean() > 0.99
    assert torch.equal(tokens[clear], expected[clear])


def test_frequencies_follow_the_probabilities() -> None:
    logits = random_logits(1, 20)[0]
    assert (spread(SamplingParams(), logits) - logits.softmax(-1)).abs().max() < 0.02


MIXED = [
    GREEDY,
    SamplingParams(seed=1),
    SamplingParams(0.7, top_p=0.9, seed=2),
    SamplingParams(1.3, top_k=40, seed=3),
    SamplingParams(1.0, top_p=0.5, top_k=7, seed=4),
    SamplingParams(2.0, min_p=0.05, seed=5),
    SamplingParams(0.0, repetition_penalty=1.5),
    SamplingParams(1.0, presence_penalty=1.0, frequency_penalty=-0.5, top_p=0.8, seed=6),
    SamplingParams(1.0, logprobs=3, seed=7),
    SamplingParams(0.0, logprobs=0),
]


@pytest.mark.parametrize("vocab", [5, 128, 1000, 4099])
def test_a_row_does_not_depend_on_its_neighbours(vocab: int) -> None:
    params = MIXED * 3
    rows = len(params)
    logits = random_logits(rows, vocab)
    tokens = [[(row * 7 + i) % vocab for i in range(row + 1)] for row in range(rows)]
    details: dict[str, list[Any]] = {
        "positions": [row * 11 for row in range(rows)],
        "outputs": [row % 3 for row in range(rows)],
        "tokens": tokens,
        "prompts": [row // 2 for row in range(rows)],
        "biases": [{row % 5: 3.0, 1 - row % 2: -math.inf} if row % 3 else {} for row in range(rows)],
    }
    together = run(logits, params, **details).fetch()
    backwards = run(logits.flip(0), params[::-1], **{k: v[::-1] for k, v in details.items()}).fetch()
    alone = [
        run(logits[row : row + 1], [params[row]], **{k: [v[row]] for k, v in details.items()}).fetch()[0]
        for row in range(rows)
    ]
    assert together == backwards[::-1] == alone


def test_logits_stay_as_they_are() -> None:
    logits = random_logits(len(MIXED), 100)
    before = logits.clone()
    run(logits, MIXED, tokens=[[1, 2, 3]] * len(MIXED), biases=[{4: 9.0}] * len(MIXED))
    assert torch.equal(logits, before)


def test_seeds_repeat_and_differ_by_output_and_position() -> None:
    logits = torch.zeros(1, 5000).expand(4, -1)
    params = [SamplingParams(seed=2**64 - 1)] * 3 + [SamplingParams(seed=2**64 - 2)]
    first = chosen(logits, params, positions=[4, 5, 4, 4], outputs=[0, 0, 1, 0])
    assert chosen(logits, params, positions=[4, 5, 4, 4], outputs=[0, 0, 1, 0]) == first
    assert len(set(first)) == 4


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    logits = torch.zeros(2, 1000)
    logits[0, [7, 500, 900]] = 1
    logits[1, 999] = 1
    assert chosen(logits, [GREEDY] * 2) == [7, 999]


def kept(params: SamplingParams, logits: Tensor) -> set[int]:
    """Which tokens of `logits` [vocab] can be drawn at all: seen by making all that are kept as likely."""
    count = 2000
    return set(chosen(logits.expand(count, -1), [params] * count))


@pytest.mark.parametrize("k", [1, 2, 5, 11, 12, 50])
def test_top_k_keeps_what_transformers_keeps(k: int) -> None:
    logits = random_logits(1, 12)
    warped = TopKLogitsWarper(k)(None, logits / 50)
    assert kept(SamplingParams(temperature=50, top_k=k), logits[0]) == finite(warped)


@pytest.mark.parametrize("p", [1e-9, 0.1, 0.35, 0.6, 0.9, 0.99])
def test_top_p_keeps_what_transformers_keeps(p: float) -> None:
    logits = random_logits(1, 12)
    warped = TopPLogitsWarper(p)(None, logits / 50)
    assert kept(SamplingParams(temperature=50, top_p=p), logits[0]) == finite(warped)


@pytest.mark.parametrize("p", [0.001, 0.8, 0.9, 0.95, 1.0])
def test_min_p_keeps_what_transformers_keeps(p: float) -> None:
    logits = random_logits(1, 12)
    warped = MinPLogitsWarper(p)(None, logits / 50)
    assert kept(SamplingParams(temperature=50, min_p=p), logits[0]) == finite(warped)


def test_min_p_then_top_k_then_top_p() -> None:
    logits = random_logits(1, 12, seed=3)
    scores = logits / 50
    for warper in (MinPLogitsWarper(0.87), TopKLogitsWarper(7), TopPLogitsWarper(0.7)):
        scores = warper(None, scores)
    params = SamplingParams(temperature=50, min_p=0.87, top_k=7, top_p=0.7)
    assert kept(params, logits[0]) == finite(scores)
    assert 1 < len(finite(scores)) < 7


def finite(scores: Tensor) -> set[int]:
    return set(scores[0].isfinite().nonzero().flatten().tolist())


@pytest.mark.parametrize("params", [SamplingParams(top_k=3), SamplingParams(top_p=0.5)])
def test_ties_at_the_border_keep_the_lowest_ids(params: SamplingParams) -> None:
    logits = torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0])
    assert kept(params, logits) == {1, 2, 3}


def test_repetition_penalty_is_that_of_transformers() -> None:
    logits = random_logits(1, 30)
    tokens = [3, 4, 4, 29]
    processed = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([tokens]), logits.clone())
    expected = spread(SamplingParams(), processed[0])
    count = 4000
    params = [SamplingParams(repetition_penalty=1.7)] * count
    drawn = run(logits.expand(count, -1), params, tokens=[tokens] * count, prompts=[2] * count).token_ids
    assert torch.equal(torch.bincount(drawn, minlength=30) / count, expected)


def test_presence_and_frequency_count_outputs_only() -> None:
    logits = random_logits(1, 30)
    expected = logits[0].clone()
    for token, times in ((4, 2), (5, 1)):
        expected[token] -= 0.6 + 0.25 * times
    count = 2000
    params = [SamplingParams(presence_penalty=0.6, frequency_penalty=0.25)] * count
    tokens = [[7, 4, 4, 5, 4]] * count
    drawn = run(logits.expand(count, -1), params, tokens=tokens, prompts=[2] * count).token_ids
    assert torch.equal(drawn, run(expected.expand(count, -1), [SamplingParams()] * count).token_ids)


def test_penalties_steer_greedy_rows_and_spare_the_others() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.9]] * 3)
    params = [GREEDY, dataclasses.replace(GREEDY, presence_penalty=0.5), GREEDY]
    assert chosen(logits, params, tokens=[[1]] * 3) == [1, 2, 1]
    # The prompt's tokens don't count, and a row may have none.
    assert chosen(logits, params, tokens=[[1]] * 3, prompts=[1] * 3) == [1, 1, 1]
    assert chosen(logits, params, tokens=[[1], [], [1]]) == [1, 1, 1]


@pytest.mark.parametrize("params", [p for p in MIXED if not p.penalised])
def test_a_bias_is_the_same_as_other_logits(params: SamplingParams) -> None:
    logits = random_logits(1, 40).expand(500, -1)
    values = {3: 4.5, 7: -100.0, 39: 2.25, 0: -math.inf}
    expected = logits.double().clone()
    for token, value in values.items():
        expected[:, token] += value

    drawn = chosen(logits, [params] * 500, biases=[values] * 500)

    assert drawn == chosen(expected.float(), [params] * 500)


def test_biases_are_added_after_penalties() -> None:
    logits = random_logits(1, 30)
    values = {4: 1.5, 5: -2.0, 6: 3.0}
    expected = logits[0].double().clone()
    for token in (4, 5):
        expected[token] *= 1.7 if expected[token] < 0 else 1 / 1.7
        expected[token] -= 0.6
    for token, value in values.items():
        expected[token] += value
    count = 2000
    params = [SamplingParams(repetition_penalty=1.7, presence_penalty=0.6)] * count
    tokens, biases = [[4, 5]] * count, [values] * count

    drawn = run(logits.expand(count, -1), params, tokens=tokens, biases=biases).token_ids

    reference = run(expected.float().expand(count, -1), [SamplingParams()] * count).token_ids
    # Float32 moves a border between two tokens by about 1e-7: no draw, or one, lies in between.
    assert (drawn != reference).sum() <= 1


def test_biases_steer_their_own_rows() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.9]] * 4)
    biases = [{}, {2: 0.2}, {1: -math.inf, 2: -math.inf}, {}]
    assert chosen(logits, [GREEDY] * 4, biases=biases) == [1, 2, 0, 1]


def test_a_row_of_which_all_is_banned_is_reported() -> None:
    logits = random_logits(2, 3)
    result = run(logits, [GREEDY] * 2, biases=[dict.fromkeys(range(3), -math.inf), {}])
    assert result.invalid.tolist() == [True, False]


def test_only_rows_with_penalties_read_their_tokens() -> None:
    batch = SamplingBatch.build([GREEDY], [0], [0], [None], [0], [None], CPU)  # type: ignore[list-item]
    assert sample(torch.tensor([[1.0, 2.0]]), batch).token_ids.tolist() == [1]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1e-5),
        SamplingParams(temperature=1e-45),
        SamplingParams(top_p=1e-9),
        SamplingParams(min_p=1.0),
        SamplingParams(top_k=1),
        SamplingParams(temperature=100, top_k=1, top_p=1e-9, min_p=1.0),
    ],
)
def test_extremes_leave_the_best_token(params: SamplingParams) -> None:
    logits = random_logits(1, 1000)
    count = 100
    assert chosen(logits.expand(count, -1), [params] * count) == [int(logits.argmax())] * count


def test_other_extremes() -> None:
    logits = random_logits(1, 300)[0]
    free = spread(SamplingParams(), logits)
    assert torch.equal(spread(SamplingParams(top_k=301), logits), free)
    assert torch.equal(spread(SamplingParams(top_k=2**31), logits), free)
    hot = spread(SamplingParams(temperature=100), logits)
    assert (hot > 0).float().mean() > 0.99
    large = torch.tensor([3e38, -3e38, 2e38])
    assert chosen(large.expand(3, -1), [SamplingParams(temperature=t) for t in (0, 1e-5, 100)]) == [0] * 3


def test_forbidden_tokens_are_never_drawn() -> None:
    logits = torch.full((1, 200), -torch.inf)
    logits[0, [13, 150]] = torch.tensor([0.0, 1.0])
    for params in (
        SamplingParams(),
        SamplingParams(temperature=100, top_k=50),
        SamplingParams(temperature=100, top_p=0.999),
        SamplingParams(repetition_penalty=2.0),
    ):
        count = 500
        drawn = chosen(logits.expand(count, -1), [params] * count, tokens=[[5, 150]] * count)
        assert set(drawn) == {13, 150}


@pytest.mark.parametrize("params", MIXED)
@pytest.mark.parametrize("bad", ["nan", "inf", "nothing"])
def test_logits_without_meaning_are_reported(params: SamplingParams, bad: str) -> None:
    logits = random_logits(3, 100)
    if bad == "nothing":
        logits[1] = -torch.inf
    else:
        logits[1, 40] = float(bad)
    result = run(logits, [params] * 3, tokens=[[1, 2]] * 3)
    assert result.invalid.tolist() == [False, True, False]
    rows = result.fetch()
    assert rows[1] == SampledToken(0, False, None)
    sound = run(logits[[0, 2]], [params] * 2, positions=[0, 2], tokens=[[1, 2]] * 2)
    assert [rows[0], rows[2]] == sound.fetch()


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = random_logits(4, 50)
    params = [
        SamplingParams(temperature=0.3, top_k=2, presence_penalty=2.0, logprobs=3),
        SamplingParams(),
        dataclasses.replace(GREEDY, logprobs=0),
        SamplingParams(temperature=5, logprobs=60),
    ]
    result = run(logits, params, tokens=[[1, 2]] * 4, biases=[{3: 50.0}, {}, {}, {4: -100.0}])
    expected = logits.log_softmax(-1)
    rows = result.fetch()
    assert [row.token_id for row in rows] == result.token_ids.tolist()
    assert all(row.valid for row in rows)
    assert rows[1].logprobs is None
    for index, count in ((0, 3), (2, 0), (3, 50)):
        found = rows[index].logprobs
        assert found is not None
        assert math.isclose(found.chosen, expected[index, rows[index].token_id].item(), rel_tol=1e-6)
        best = expected[index].sort(descending=True)
        assert [token for token, _ in found.top] == best.indices[:count].tolist()
        assert [value for _, value in found.top] == pytest.approx(best.values[:count].tolist())


def test_equal_logprobs_rank_by_id() -> None:
    logits = torch.zeros(1, 400)
    logits[0, [300, 20]] = 1.0
    (row,) = run(logits, [dataclasses.replace(GREEDY, logprobs=5)]).fetch()
    assert isinstance(row.logprobs, RowLogprobs)
    assert [token for token, _ in row.logprobs.top] == [20, 300, 0, 1, 2]


def test_an_empty_batch_and_int32_tokens() -> None:
    assert run(torch.zeros(0, 10), []).fetch() == []
    params = [dataclasses.replace(GREEDY, frequency_penalty=1.0)]
    batch = SamplingBatch.build(params, [0], [2], [torch.tensor([1, 1], dtype=torch.int32)], [0], [None], CPU)
    assert sample(torch.tensor([[0.0, 1.5]]), batch).token_ids.tolist() == [0]
