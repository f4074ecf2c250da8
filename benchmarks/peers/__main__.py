"""Makes the environments of the peers that are named."""

import argparse

from benchmarks.command import BenchmarkError
from benchmarks.peers import PEERS, install


def main() -> None:
    """Prints where each one lies."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("names", nargs="+", choices=PEERS, metavar="NAME", help=", ".join(PEERS))
    try:
        for name in parser.parse_args().names:
            print(install(name))
    except BenchmarkError as error:
        parser.exit(1, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    main()
