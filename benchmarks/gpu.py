"""Everything that an NVIDIA GPU is to show, in one command: kernels against `reference`, then end to end.

Each model has the shape of a Llama and random weights. End to end is 512 requests at once with long-tailed
outputs, against `transformers` in static batches of 16 and with its continuous batching. Contenders are
loaded one after another, as two large models may not fit together. `--device cpu` runs the same on a CPU.
"""

from argparse import Namespace
from collections.abc import Sequence

from benchmarks import kernels, throughput
from benchmarks.command import Parser, execute, rounds_of
from benchmarks.device import device_of
from benchmarks.random_model import SHAPES
from benchmarks.results import Results


def parse() -> Parser:
    """Flags."""
    parser = Parser("gpu", __doc__)
    parser.add_argument(
        "--shapes", nargs="+", choices=SHAPES, default=["llama-1b", "llama-8b"], help="models"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="where everybody computes")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the weights")
    parser.add_peers(("transformers", "transformers-continuous"), ("transformers", "transformers-continuous"))
    parser.add_argument("--no-server", action="store_true", help="leave out the gRPC path")
    return parser


def body(options: Namespace, results: Results) -> None:
    """All lines of each model."""
    device_of(options.device)
    for shape in options.shapes:
        shared = ["--model-shape", shape, "--device", options.device, "--dtype", options.dtype]
        shared += ["--rounds", str(rounds_of(options, 2))]
        shared += ["--quick"] if options.quick else []
        kernels.body(kernels.parse().parse_args(shared), results)
        asked = ["--workload", "long-tailed", "--one-at-a-time", "--peers", *options.peers]
        asked += ["--no-server"] if options.no_server else []
        throughput.body(throughput.parse().parse_args([*shared, *asked]), results)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs `python -m benchmarks.gpu`."""
    execute(parse(), arguments, body)


if __name__ == "__main__":
    main()
