"""Versions that processes tell each other."""

from typing import Final

VERSION: Final = "0.1.0"

# Scheduler and shards must be equal; router and scheduler may be one apart.
PROTOCOL_VERSION: Final = 1
