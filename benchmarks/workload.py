"""What every contender is asked: seeded requests as token ids, with output lengths that are met exactly."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

# Below these lie the special tokens of the models that we measure.
FIRST_TOKEN_ID: Final = 256


@dataclass(frozen=True)
class WorkRequest:
    """A prompt in token ids, and how many tokens come of it, whatever they are.

    `arrival_s` is in seconds after the start of the run.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    arrival_s: float = 0.0


Work = Sequence[WorkRequest]


def make(lengths: Sequence[tuple[int, int]], vocab_size: int, seed: int = 0) -> list[WorkRequest]:
    """One request per pair of prompt and output length in tokens; prompts share no beginning."""
    rng = random.Random(f"prompts {seed}")  # noqa: S311
    first = min(FIRST_TOKEN_ID, vocab_size // 2)
    return [
        WorkRequest(tuple(rng.randrange(first, vocab_size) for _ in range(prompt)), output)
        for prompt, output in lengths
    ]


def offline(vocab_size: int, count: int = 64, seed: int = 0) -> list[WorkRequest]:
    """All at once: prompts of 64 to 192 tokens, outputs of 32 to 160."""
    rng = random.Random(f"offline {seed}")  # noqa: S311
    lengths = [(rng.randint(64, 192), rng.randint(32, 160)) for _ in range(count)]
    return make(lengths, vocab_size, seed)


def long_tailed(
    vocab_size: int, count: int = 512, seed: int = 0, median: int = 128, longest: int = 2048
) -> list[WorkRequest]:
    """All at once: prompts of 64 to 192 tokens, outputs log-normal with this median, at most `longest`."""
    rng = random.Random(f"long-tailed {seed}")  # noqa: S311
    outputs = [min(max(round(rng.lognormvariate(math.log(median), 1.2)), 1), longest) for _ in range(count)]
    return make([(rng.randint(64, 192), output) for output in outputs], vocab_size, seed)


def single(vocab_size: int, prompt: int = 128, output: int = 128, seed: int = 0) -> list[WorkRequest]:
    """One request."""
    return make([(prompt, output)], vocab_size, seed)


def poisson(work: Work, rate: float, seed: int = 0) -> list[WorkRequest]:
    """The same requests, arriving at `rate` a second on average."""
    rng = random.Random(f"arrivals {seed}")  # noqa: S311
    arrival, arriving = 0.0, []
    for request in work:
        arriving.append(replace(request, arrival_s=arrival))
        arrival += rng.expovariate(rate)
    return arriving


def beside_a_long_prompt(
    vocab_size: int, prompt: int, shorts: int, rate: float, seed: int = 0
) -> list[WorkRequest]:
    """First one request of `prompt` tokens; just behind it, `shorts` short ones at `rate` a second."""
    first, *others = make([(prompt, 8), *[(32, 8)] * shorts], vocab_size, seed)
    arriving = poisson(others, rate, seed)
    return [first, *(replace(short, arrival_s=short.arrival_s + 0.05) for short in arriving)]


def output_tokens(work: Work) -> int:
    """Over all requests."""
    return sum(request.max_tokens for request in work)


@dataclass(frozen=True)
class Answer:
    """What the client of one request saw, in seconds since it arrived; `ttft_s` is to the first token."""

    tokens: int
    ttft_s: float
    end_s: float

    @property
    def itl_s(self) -> float:
        """Mean over the gaps between tokens; 0 for one token."""
        return (self.end_s - self.ttft_s) / max(self.tokens - 1, 1)


@dataclass(frozen=True)
class Run:
    """One run of some work. `answers` are in the order of the requests, or empty where nothing was timed."""

    seconds: float
    tokens: int
    answers: tuple[Answer, ...] = ()

    @property
    def rate(self) -> float:
        """Output tokens per second."""
        return self.tokens / self.seconds
