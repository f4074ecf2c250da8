"""One line per event on standard error. Prompt and output text never go there."""

import logging
import sys


def setup(service: str, level: str) -> None:
    """Sets the root logger's format, with the service's name, and its level."""
    logging.basicConfig(
        stream=sys.stderr,
        level=level.upper(),
        format=f"%(asctime)s {service} %(levelname)s %(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )
