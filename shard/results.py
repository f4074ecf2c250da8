"""The outcome of one step, on its way to the scheduler."""

import time
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from pagoda.shard.v1 import shard_pb2
from pagoda.shard.v1.shard_pb2 import ExecuteResponse, Sampled
from pagoda.v1.sampling_pb2 import PositionLogprobs, TokenLogprob
from shard.logprobs import RowLogprobs
from shard.prompt_logprobs import PromptLogprobs
from shard.sampler import SampledToken, SampleResult


class Stopwatch:
    """Marks moments in a device's work, without waiting for them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.cuda.Event] = []
        self._moments: list[float] = []

    def mark(self) -> None:
        """Of a GPU: when it gets to here in its current stream."""
        if self._device.type == "cuda":
            self._events.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
            self._events[-1].record()
        else:
            self._moments.append(time.perf_counter())

    def laps(self) -> list[float]:
        """Seconds between marks. Waits for the last of them."""
        for event in self._events[-1:]:
            event.synchronize()
        on_gpu = [one.elapsed_time(other) / 1000 for one, other in pairwise(self._events)]
        return on_gpu + [other - one for one, other in pairwise(self._moments)]


@dataclass
class StepResult:
    """`slots` sampled, in the order of `samples`. On a GPU the tokens may still be on their way."""

    epoch: int
    step: int
    watch: Stopwatch
    """Its laps: the model, the sampler."""
    num_tokens: int = 0
    slots: list[int] = field(default_factory=list)
    samples: SampleResult | None = None
    # Per slot, how many candidates its beam wants; 0: the log-probabilities are for the client.
    num_candidates: list[int] = field(default_factory=list)
    prompt_logprobs: PromptLogprobs | None = None

    def to_proto(self) -> ExecuteResponse:
        """Waits for the device, also where nothing is sampled: the scheduler counts steps in flight."""
        tokens = self.samples.fetch() if self.samples else []
        compute_seconds, sample_seconds = self.watch.laps() or (0.0, 0.0)
        return ExecuteResponse(
            epoch=self.epoch,
            step=self.step,
            sampled=[
                _sampled(slot, token, wanted)
                for slot, token, wanted in zip(self.slots, tokens, self.num_candidates, strict=True)
            ],
            compute_seconds=compute_seconds,
            sample_seconds=sample_seconds,
            prompt_logprobs=[
                shard_pb2.PromptLogprobs(
                    slot=slot, positions=[_logprobs(token.token_id, token.logprobs) for token in tokens_known]
                )
                for slot, tokens_known in (self.prompt_logprobs.fetch() if self.prompt_logprobs else ())
            ],
        )


def _sampled(slot: int, token: SampledToken, num_candidates: int) -> Sampled:
    sampled = Sampled(slot=slot, token_id=token.token_id, invalid=not token.valid)
    if token.logprobs and num_candidates:
        sampled.candidates.extend(
            TokenLogprob(token_id=other, logprob=logprob) for other, logprob in token.logprobs.top
        )
    elif token.logprobs:
        sampled.logprobs.CopyFrom(_logprobs(token.token_id, token.logprobs))
    return sampled


def _logprobs(token_id: int, row: RowLogprobs) -> PositionLogprobs:
    return PositionLogprobs(
        chosen=TokenLogprob(token_id=token_id, logprob=row.chosen),
        top=[TokenLogprob(token_id=other, logprob=logprob) for other, logprob in row.top],
    )
