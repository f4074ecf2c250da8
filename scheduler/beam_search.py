"""Which beams go on, and which are done: the rules of `transformers`, on numbers alone."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Candidate(NamedTuple):
    """A possible next token of one beam, and its log-probability."""

    token_id: int
    logprob: float


class Continuation(NamedTuple):
    """A beam of the next step: the beam of this step that it continues, its next token and total score."""

    parent: int
    token_id: int
    score: float


@dataclass(frozen=True)
class Hypothesis:
    """A finished output; `score` is its log-probability over its length to the power of the penalty."""

    token_ids: list[int]
    score: float
    # Ended by an end-of-sequence token rather than by its length.
    stopped: bool


@dataclass
class BeamSearch:
    """The state of one request's search.

    Each step takes every beam's best candidates and yields the beams of the next step. Source: beam search
    as `transformers` does it (`GenerationMixin._beam_search`), to give the same output on the same logits.
    """

    width: int
    length_penalty: float
    early_stopping: bool
    stop_token_ids: frozenset[int]
    # Output tokens of one hypothesis, at most.
    max_tokens: int
    # Stop tokens are no candidates before an output has so many tokens.
    min_tokens: int = 0
    scores: list[float] = field(default_factory=lambda: [0.0])
    finished: list[Hypothesis] = field(default_factory=list)

    @property
    def num_candidates(self) -> int:
        """Candidates that each beam has to offer: enough to go on if all stop tokens are among them."""
        return max(2, 1 + len(self.stop_token_ids)) * self.width

    def advance(
        self, outputs: Sequence[Sequence[int]], candidates: Sequence[Sequence[Candidate]]
    ) -> list[Continuation]:
        """The beams of the next step, best first; none when the search is over.

        `outputs` are the beams' output tokens so far, all of one length, in the order of `scores`;
        `candidates` each beam's, `num_candidates` or all there are.
        """
        length = len(outputs[0]) + 1
        ranked = sorted(
            (
                Continuation(beam, token_id, self.scores[beam] + logprob)
                for beam, offered in enumerate(candidates)
                for token_id, logprob in offered
                if length > self.min_tokens or token_id not in self.stop_token_ids
            ),
            key=lambda continuation: (-continuation.score, continuation.parent, continuation.token_id),
        )[: self.num_candidates]
        going_on: list[Continuation] = []
        for place, continuation in enumerate(ranked):
            stopped = continuation.token_id in self.stop_token_ids
            if not stopped and length < self.max_tokens:
                going_on.append(continuation)
            elif place < self.width:
                # Those ranked lower are there to have enough to go on with, and can't finish.
                token_ids = [*outputs[continuation.parent], continuation.token_id]
                score = continuation.score / length**self.length_penalty
                self._finish(Hypothesis(token_ids, score, stopped))
        going_on = going_on[: self.width]
        self.scores = [continuation.score for continuation in going_on]
        return [] if self._over(length) else going_on

    def _finish(self, hypothesis: Hypothesis) -> None:
        if self.early_stopping and len(self.finished) == self.width:
            return
        self.finished.append(hypothesis)
        self.finished.sort(key=lambda one: -one.score)
        del self.finished[self.width :]

    def _over(self, length: int) -> bool:
        if not self.scores:
            return True
        if len(self.finished) < self.width:
            return False
        best_possible = self.scores[0] / length**self.length_penalty
        return self.early_stopping or best_possible <= self.finished[-1].score
