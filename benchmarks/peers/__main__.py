"""Makes the environments of the peers that are named."""

from benchmarks.command import BareParser, failing_in_one_line
from benchmarks.peers import PEERS, install


def main() -> None:
    """Prints where each one lies."""
    parser = BareParser("peers", __doc__)
    parser.add_argument("names", nargs="+", choices=PEERS, metavar="NAME", help=", ".join(PEERS))
    options = parser.parse_args()
    with failing_in_one_line(parser.prog):
        for name in options.names:
            print(install(name))


if __name__ == "__main__":
    main()
