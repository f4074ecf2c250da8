"""`python -m router.keys new --id NAME`: makes an API key and its entry for `--api-keys-file`."""

import argparse
import sys

from common.config import ConfigError
from router.auth import check_id, digest, new_key


def main(argv: list[str] | None = None) -> int:
    """Prints the entry on standard output and the key, this once, on standard error."""
    parser = argparse.ArgumentParser(prog="python -m router.keys", allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    new = commands.add_parser("new", allow_abbrev=False, help="Make a key.")
    new.add_argument("--id", required=True, help="Whom it is for; routers and schedulers know it by this.")
    arguments = parser.parse_args(argv)
    try:
        key_id = check_id("--id", arguments.id)
    except ConfigError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    key = new_key()
    print(f'- id: "{key_id}"\n  key_sha256: "{digest(key)}"', flush=True)
    print(f"The key of {key_id}, which is shown this once: {key}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
