"""Chooses one token per row of logits: a pure function of (logits, parameters, seed, output index, position).

Order: penalties, biases, temperature, min-p, top-k, top-p, then one draw by inverse CDF in token-id order.

Probabilities are whole multiples of 2**-34 of the likeliest token's, held in floats. Their sums are exact in
float64 in whatever order a device adds them, so a row's token depends neither on its neighbours in the batch
nor on the device's scan; a token under 2**-34 of the likeliest is never drawn.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from shard.download import Download
from shard.logprobs import RowLogprobs, greatest, log_probabilities
from shard.philox import uniform

# Sums of up to 2**19 tokens stay below 2**53, up to where float64 holds every whole number.
_SCALE = 2.0**34
# Tokens that a draw first looks at together; it divides the vocabularies of Llama, Mistral and Qwen.
_RUN = 128
# The least normal float32: a smaller divisor may be flushed to zero.
_MIN_TEMPERATURE = 2.0**-126


@dataclass(frozen=True)
class SamplingParams:
    """How one sequence chooses its tokens; `protos/pagoda/v1/sampling.proto` says what each field means."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    """Taken modulo 2**64."""
    logprobs: int | None = None

    @property
    def penalised(self) -> bool:
        """Whether tokens seen before change the logits."""
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty)
        return penalties != (0, 0, 1)


@dataclass(frozen=True)
class Bias:
    """What is added to the logits of some tokens: `token_ids` int64 [b], each once; `values` float32 [b]."""

    token_ids: Tensor
    values: Tensor


@dataclass(frozen=True)
class _Biases:
    """Those of several rows strung together."""

    rows: Tensor
    """int64 [t], of each entry."""
    token_ids: Tensor
    values: Tensor


@dataclass(frozen=True)
class _Penalties:
    """`rows` int64 [p]; the tokens of all of them strung together, [t]; penalties float32 [p]."""

    rows: Tensor
    token_ids: Tensor
    owners: Tensor
    """Index into `rows` of each token."""
    is_output: Tensor
    presence: Tensor
    frequency: Tensor
    repetition: Tensor


@dataclass(frozen=True)
class _Truncation:
    """Top-k and top-p of some draws: `draws` int64 [t], `top_k` int64 and `top_p` float64 [t, 1]."""

    draws: Tensor
    top_k: Tensor
    top_p: Tensor
    width: int
    """How many tokens of a row have to be put in order."""

    def parts(self) -> "list[_Truncation]":
        """On a CPU a few draws at a time, so that what is computed of them stays in its cache."""
        size = 4 if self.draws.device.type == "cpu" else len(self.draws)
        slices = [slice(start, start + size) for start in range(0, len(self.draws), size)]
        return [_Truncation(self.draws[s], self.top_k[s], self.top_p[s], self.width) for s in slices]


@dataclass(frozen=True)
class _Draws:
    """The rows that aren't greedy: `rows` int64 [d], the others [d, 1]."""

    rows: Tensor
    temperature: Tensor
    uniform: Tensor
    min_log_p: Tensor | None
    truncations: tuple[_Truncation, ...]


@dataclass(frozen=True)
class _LogprobRows:
    rows: list[int]
    counts: list[int]
    """How many alternatives each of them asked for."""


@dataclass(frozen=True)
class SamplingBatch:
    """The parameters of a batch's rows on the device, grouped by need; an empty group costs nothing."""

    penalties: _Penalties | None
    biases: _Biases | None
    draws: _Draws | None
    logprobs: _LogprobRows | None

    @classmethod
    def build(
        cls,
        params: Sequence[SamplingParams],
        output_indices: Sequence[int],
        positions: Sequence[int],
        token_ids: Sequence[Tensor],
        prompt_lengths: Sequence[int],
        biases: Sequence[Bias | None],
        device: torch.device,
    ) -> "SamplingBatch":
        """One entry per row: its parameters, output index, the position that its next token will have, bias.

        `token_ids`: the row's tokens so far, an integer [length] on `device`, of which the first
        `prompt_lengths` are the prompt. Read only for rows with penalties.
        """
        penalised = [row for row, p in enumerate(params) if p.penalised]
        biased = {row: bias for row, bias in enumerate(biases) if bias}
        drawn = [row for row, p in enumerate(params) if p.temperature > 0]
        asking = {row: p.logprobs for row, p in enumerate(params) if p.logprobs is not None}
        return cls(
            _penalties(penalised, params, token_ids, prompt_lengths, device) if penalised else None,
            _biases(biased, device) if biased else None,
            _draws(drawn, params, output_indices, positions, device) if drawn else None,
            _LogprobRows([*asking], [*asking.values()]) if asking else None,
        )


def _column(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=dtype).unsqueeze(-1).to(device)


def _penalties(
    rows: list[int],
    params: Sequence[SamplingParams],
    token_ids: Sequence[Tensor],
    prompt_lengths: Sequence[int],
    device: torch.device,
) -> _Penalties:
    lengths = [len(token_ids[row]) for row in rows]
    within = torch.cat([torch.arange(length) for length in lengths])
    owners = torch.repeat_interleave(torch.tensor(lengths))
    prompts = torch.tensor([prompt_lengths[row] for row in rows])
    return _Penalties(
        torch.tensor(rows, device=device),
        torch.cat([token_ids[row].long() for row in rows]),
        owners.to(device),
        (within >= prompts[owners]).to(device),
        torch.tensor([params[row].presence_penalty for row in rows], device=device),
        torch.tensor([params[row].frequency_penalty for row in rows], device=device),
        torch.tensor([params[row].repetition_penalty for row in rows], device=device),
    )


def _biases(biased: Mapping[int, Bias], device: torch.device) -> _Biases:
    lengths = torch.tensor([len(bias.token_ids) for bias in biased.values()])
    return _Biases(
        torch.repeat_interleave(torch.tensor([*biased]), lengths).to(device),
        torch.cat([bias.token_ids for bias in biased.values()]),
        torch.cat([bias.values for bias in biased.values()]),
    )


def _draws(
    rows: list[int],
    params: Sequence[SamplingParams],
    output_indices: Sequence[int],
    positions: Sequence[int],
    device: torch.device,
) -> _Draws:
    drawn = [params[row] for row in rows]
    # Seeds are unsigned, torch's integers aren't: the same 64 bits.
    seeds = [(p.seed + 2**63) % 2**64 - 2**63 for p in drawn]
    # On the CPU, where ten rounds on a few rows cost less than their launches on a GPU.
    uniforms = uniform(
        torch.tensor(seeds),
        torch.tensor([output_indices[row] for row in rows]),
        torch.tensor([positions[row] for row in rows]),
    )
    min_p = torch.tensor([p.min_p for p in drawn]).unsqueeze(-1)
    # A top-k leaves few tokens to put in order, a top-p alone all of them.
    narrow = [draw for draw, p in enumerate(drawn) if p.top_k > 0]
    wide = [draw for draw, p in enumerate(drawn) if p.top_k <= 0 and p.top_p < 1]
    return _Draws(
        torch.tensor(rows, device=device),
        _column([p.temperature for p in drawn], torch.float32, device).clamp(min=_MIN_TEMPERATURE),
        uniforms.unsqueeze(-1).to(device),
        min_p.log().to(device) if min_p.any() else None,
        tuple(_truncation(group, drawn, device) for group in (narrow, wide) if group),
    )


def _truncation(draws: list[int], drawn: Sequence[SamplingParams], device: torch.device) -> _Truncation:
    counts = [drawn[draw].top_k or torch.iinfo(torch.int64).max for draw in draws]
    return _Truncation(
        torch.tensor(draws, device=device),
        _column(counts, torch.int64, device),
        _column([drawn[draw].top_p for draw in draws], torch.float64, device),
        max(counts),
    )


@dataclass(frozen=True)
class SampledToken:
    """One row's result on the host."""

    token_id: int
    valid: bool
    """False if the logits held a NaN or +inf, or nothing but -inf; the token is 0 then."""
    logprobs: RowLogprobs | None
    """None if the row didn't ask, or isn't valid."""


@dataclass(frozen=True)
class SampleResult:
    """What `sample` chose. The copy to the host is on its way; `fetch` waits for it and for nothing else."""

    token_ids: Tensor
    """int64 [rows], on the device."""
    invalid: Tensor
    """bool [rows], on the device."""
    _download: Download
    _logprobs: _LogprobRows | None

    def token_id(self, row: int) -> int:
        """One row's token, on the host."""
        return int(self._download.wait()[row])

    def fetch(self) -> list[SampledToken]:
        """The result on the host, row by row."""
        rows = len(self.token_ids)
        packed = self._download.fetch()
        token_ids, invalid, rest = packed[:rows], packed[rows : 2 * rows], packed[2 * rows :]
        logprobs: dict[int, RowLogprobs] = {}
        if self._logprobs is not None:
            asking = len(self._logprobs.rows)
            fields = len(rest) // asking
            for index, (row, count) in enumerate(
                zip(self._logprobs.rows, self._logprobs.counts, strict=True)
            ):
                logprobs[row] = RowLogprobs.unpack(rest[index * fields : (index + 1) * fields], count)
        return [
            SampledToken(int(token), not bad, None if bad else logprobs.get(row))
            for row, (token, bad) in enumerate(zip(token_ids, invalid, strict=True))
        ]


def sample(
    logits: Tensor, batch: SamplingBatch, mask: Callable[[Tensor], None] | None = None
) -> SampleResult:
    """Chooses a token for each row of `logits`, float32 [rows, vocab], which stay as they are but for `mask`.

    A temperature of 0 takes the likeliest token, the one with the lowest id among equals. `mask` puts -inf in
    the place of what may not be chosen; log-probabilities are those of the logits before.
    """
    raw = None if batch.logprobs is None else logits[batch.logprobs.rows]
    if mask:
        mask(logits)
    scores = logits if batch.penalties is None else _penalise(logits, batch.penalties)
    scores = scores if batch.biases is None else _add(scores, batch.biases)
    best, token_ids = scores.max(dim=-1)
    invalid = ~best.isfinite()
    if batch.draws is not None:
        rows = batch.draws.rows
        token_ids[rows] = _draw(scores[rows], best[rows].unsqueeze(-1), batch.draws)
    token_ids.masked_fill_(invalid, 0)

    parts = [token_ids.double(), invalid.double()]
    if batch.logprobs is not None and raw is not None:
        asking = torch.tensor(batch.logprobs.rows, device=logits.device)
        width = max(batch.logprobs.counts)
        parts.append(log_probabilities(raw, token_ids[asking], width).flatten())
    return SampleResult(token_ids, invalid, Download(torch.cat(parts)), batch.logprobs)


def _penalise(logits: Tensor, penalties: _Penalties) -> Tensor:
    """Repetition as in CTRL (arXiv 1909.05858, section 4.1), presence and frequency as OpenAI has them."""
    owners, vocab = penalties.owners, logits.shape[-1]
    scores = logits.flatten().clone()
    cells = penalties.rows[owners] * vocab + penalties.token_ids
    counted = owners * vocab + penalties.token_ids
    counts = torch.zeros(len(penalties.rows) * vocab, device=logits.device)
    counts.index_add_(0, counted, penalties.is_output.float())

    # A token that came often is computed, and written, as often, with the same result each time.
    count, score = counts[counted], scores[cells]
    repetition = penalties.repetition[owners]
    score = torch.where(score > 0, score / repetition, score * repetition)
    score -= penalties.frequency[owners] * count + penalties.presence[owners] * (count > 0)
    scores[cells] = score
    return scores.view_as(logits)


def _add(scores: Tensor, biases: _Biases) -> Tensor:
    """Once per cell: no row has a token twice."""
    cells = biases.rows * scores.shape[-1] + biases.token_ids
    return scores.flatten().index_add(0, cells, biases.values).view_as(scores)


def _draw(scores: Tensor, best: Tensor, draws: _Draws) -> Tensor:
    """Tokens int64 [d] for `scores` [d, vocab], which are used up; `best` [d, 1] holds their maxima."""
    vocab = scores.shape[-1]
    scores.sub_(best).div_(draws.temperature)
    if draws.min_log_p is not None:
        scores.masked_fill_(scores < draws.min_log_p, -torch.inf)
    for truncation in draws.truncations:
        for part in truncation.parts():
            scores[part.draws] = _truncate(scores[part.draws], part)
    # In two levels, for a tenth of the float64s of a sum over the whole vocabulary.
    weights = _weights(F.pad(scores, (0, -vocab % _RUN), value=-torch.inf) if vocab % _RUN else scores)
    runs = weights.view(len(weights), -1, _RUN)
    sums = runs.sum(-1, dtype=torch.float64)
    cumulative = sums.cumsum(-1)
    total = cumulative[:, -1:]
    # Weights are whole numbers, so this bound only undoes a product rounded up to the total.
    target = torch.minimum(draws.uniform * total, total - 1)
    run = torch.searchsorted(cumulative, target, right=True).clamp_(max=sums.shape[-1] - 1)
    target -= (cumulative - sums).gather(-1, run)
    within = runs.take_along_dim(run.unsqueeze(-1), 1).squeeze(1).double().cumsum(-1)
    chosen = run * _RUN + torch.searchsorted(within, target, right=True)
    return chosen.squeeze(-1).clamp_(max=vocab - 1)


def _weights(scores: Tensor) -> Tensor:
    """Probabilities relative to a score of 0, as whole numbers in float32, in the place of `scores`."""
    return scores.exp_().mul_(_SCALE).floor_()


def _truncate(scores: Tensor, truncation: _Truncation) -> Tensor:
    """Puts -inf in the place of all but the likeliest tokens; the best always stays."""
    top_k = truncation.top_k.clamp(max=scores.shape[-1])
    ordered = _descending(scores, truncation.width)
    weights = _weights(ordered.clone()).double()
    cumulative = weights.cumsum(-1)
    enough = truncation.top_p * cumulative.gather(-1, top_k - 1)
    count = (cumulative - weights < enough).sum(-1, keepdim=True)
    kept = greatest(scores, ordered, torch.minimum(count, top_k).clamp(min=1))
    return scores.masked_fill(~kept, -torch.inf)


def _descending(scores: Tensor, width: int) -> Tensor:
    """The `width` greatest of each row of [t, vocab], in order."""
    if width < scores.shape[-1]:
        return scores.topk(width).values
    if scores.device.type == "cpu":
        # numpy's vectorised sort takes a twenty-fifth of the time of torch's.
        return torch.from_numpy(np.sort(scores.numpy())).flip(-1)
    return scores.sort(descending=True).values
