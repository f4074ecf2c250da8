"""The outcome of one step, on its way to the scheduler."""

from dataclasses import dataclass, field

from pagoda.shard.v1.shard_pb2 import ExecuteResponse, Sampled
from pagoda.v1.sampling_pb2 import PositionLogprobs, TokenLogprob
from shard.sampler import RowLogprobs, SampledToken, SampleResult


@dataclass
class StepResult:
    """`slots` sampled, in the order of `samples`. On a GPU the tokens may still be on their way."""

    epoch: int
    step: int
    num_tokens: int = 0
    slots: list[int] = field(default_factory=list)
    samples: SampleResult | None = None
    # Per slot, how many candidates its beam wants; 0: the log-probabilities are for the client.
    num_candidates: list[int] = field(default_factory=list)
    compute_seconds: float = 0.0
    sample_seconds: float = 0.0

    def to_proto(self) -> ExecuteResponse:
        """Waits for the device, if need be."""
        tokens = self.samples.fetch() if self.samples else []
        return ExecuteResponse(
            epoch=self.epoch,
            step=self.step,
            sampled=[
                _sampled(slot, token, wanted)
                for slot, token, wanted in zip(self.slots, tokens, self.num_candidates, strict=True)
            ],
            compute_seconds=self.compute_seconds,
            sample_seconds=self.sample_seconds,
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
