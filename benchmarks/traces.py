"""What clients ask, and when: seeded request traces without texts.

Token ids mean nothing here, except that equal prompts must have equal ids. So a prompt is a list of runs of
one id each, and each request's own text has an id of its own.
"""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from statistics import NormalDist, fmean
from typing import Final, NamedTuple

Arrivals = Iterator[float]


class Run(NamedTuple):
    """`length` tokens of one id."""

    token_id: int
    length: int


@dataclass(frozen=True)
class TraceRequest:
    """One request: a prompt, and `n` outputs of `output_length` tokens, each with the id `output_id`.

    `arrival_s` is in seconds after the start of the trace; if `follows` is the index of another request, in
    seconds after that one's end.
    """

    arrival_s: float
    prompt: tuple[Run, ...]
    output_id: int
    output_length: int
    n: int = 1
    follows: int | None = None

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return sum(run.length for run in self.prompt)

    @property
    def token_ids(self) -> list[int]:
        """The prompt, token by token."""
        return [run.token_id for run in self.prompt for _ in range(run.length)]


Trace = list[TraceRequest]


@dataclass(frozen=True)
class Lengths:
    """Tokens of prompts or outputs: log-normal, clipped to 1 … `longest`, with this mean after clipping."""

    mean: float
    sigma: float
    longest: int = 1024

    def draw(self, rng: random.Random) -> int:
        """One length in tokens."""
        return _clip(rng.lognormvariate(_mu(self), self.sigma), self.longest)


# PagedAttention paper (SOSP 2023), section 6.1 and figure 11: mean input and output lengths of its two data
# sets. The paper gives no variance: sigma is chosen to give the long tails that its histograms show.
SHAREGPT_LIKE: Final = (Lengths(161.31, 1.2), Lengths(337.99, 0.9))
ALPACA_LIKE: Final = (Lengths(19.31, 0.5), Lengths(58.45, 0.9))


def _clip(value: float, longest: int) -> int:
    return min(max(round(value), 1), longest)


@cache
def _mu(lengths: Lengths) -> float:
    """The log-normal's mu, by bisection on the mean over its quantiles."""
    quantiles = [NormalDist().inv_cdf((i + 0.5) / 2000) for i in range(2000)]
    low, high = 0.0, math.log(lengths.longest)
    for _ in range(50):
        mu = (low + high) / 2
        mean = fmean(_clip(math.exp(mu + lengths.sigma * z), lengths.longest) for z in quantiles)
        low, high = (mu, high) if mean < lengths.mean else (low, mu)
    return low


def _random(seed: int) -> random.Random:
    return random.Random(seed)  # noqa: S311


# When requests arrive.


def poisson(rate: float, seed: int = 0) -> Arrivals:
    """Arrival times in seconds, `rate` a second on average, independent of each other."""
    rng = _random(seed)
    now = 0.0
    while True:
        now += rng.expovariate(rate)
        yield now


def bursts(rate: float, size: int, seed: int = 0) -> Arrivals:
    """The same rate, but `size` requests at a time."""
    for now in poisson(rate / size, seed):
        yield from [now] * size


def at_once() -> Arrivals:
    """Everything at the start."""
    while True:
        yield 0.0


# What they ask.


def chat(
    count: int,
    arrivals: Arrivals,
    lengths: tuple[Lengths, Lengths] = SHAREGPT_LIKE,
    seed: int = 0,
    n: int = 1,
    system_prompts: int = 0,
    system_prompt_length: int = 0,
) -> Trace:
    """Independent requests; each begins with one of `system_prompts` shared prompts if there are any."""
    rng = _random(seed)
    prompt_lengths, output_lengths = lengths
    ids = _fresh_ids(system_prompts)
    trace = []
    for arrival in islice(arrivals, count):
        prompt = [Run(next(ids), prompt_lengths.draw(rng))]
        if system_prompts:
            prompt.insert(0, Run(rng.randrange(system_prompts), system_prompt_length))
        trace.append(TraceRequest(arrival, tuple(prompt), next(ids), output_lengths.draw(rng), n))
    return trace


def agents(
    conversations: int,
    turns: int,
    arrivals: Arrivals,
    seed: int = 0,
    system_prompt_length: int = 256,
    user: Lengths = Lengths(60, 0.8, 256),
    output: Lengths = Lengths(80, 0.8, 256),
    think_s: float = 5.0,
    longest: int = 2048,
) -> Trace:
    """Conversations: each turn's prompt is the last one's, its output, and new text of the user or a tool.

    A turn begins `think_s` seconds on average after the end of the one before. A conversation ends early
    rather than exceed `longest` tokens. The lengths are ours.
    """
    rng = _random(seed)
    ids = _fresh_ids(1)
    trace: Trace = []
    for start in islice(arrivals, conversations):
        prompt = [Run(0, system_prompt_length)]
        follows = None
        arrival = start
        for _ in range(turns):
            prompt.append(Run(next(ids), user.draw(rng)))
            turn = TraceRequest(arrival, tuple(prompt), next(ids), output.draw(rng), follows=follows)
            if turn.prompt_length + turn.output_length > longest:
                break
            follows, arrival = len(trace), rng.expovariate(1 / think_s)
            trace.append(turn)
            prompt.append(Run(turn.output_id, turn.output_length))
    return trace


def _fresh_ids(start: int) -> Iterator[int]:
    return iter(range(start, 1 << 31))


# By the names that the benchmarks' flags have: a trace of `count` requests at `rate` a second.
TRACES: Final[dict[str, Callable[[int, float, int], Trace]]] = {
    "sharegpt-like": lambda count, rate, seed: chat(count, poisson(rate, seed), seed=seed),
    "alpaca-like": lambda count, rate, seed: chat(count, poisson(rate, seed), ALPACA_LIKE, seed),
    "bursts": lambda count, rate, seed: chat(count, bursts(rate, 32, seed), seed=seed),
    "parallel": lambda count, rate, seed: chat(count, poisson(rate, seed), ALPACA_LIKE, seed, n=4),
    "system-prompts": lambda count, rate, seed: chat(
        count, poisson(rate, seed), ALPACA_LIKE, seed, system_prompts=4, system_prompt_length=400
    ),
    "agents": lambda count, rate, seed: agents(-(-count // 8), 8, poisson(rate / 8, seed), seed),
}
