"""What /metrics says of every process: its build, its model, and the files that it reads anew."""

from typing import Final

from prometheus_client import Counter, Gauge

from common.version import PROTOCOL_VERSION, VERSION

BUILD: Final = Gauge("pagoda_build_info", "Always 1; labels say what runs", ["version", "protocol_version"])
BUILD.labels(VERSION, str(PROTOCOL_VERSION)).set(1)
MODEL: Final = Gauge(
    "pagoda_model_info", "Always 1; labels say what is served", ["name", "revision", "dtype"]
)
RELOADS: Final = Counter("pagoda_reloads", "Files that changed, read anew", ["files", "result"])
STALE: Final = Gauge(
    "pagoda_stale_files", "1 while changed files are broken and what was read before stays in use", ["files"]
)
EXPIRY: Final = Gauge(
    "pagoda_certificate_expiry_timestamp_seconds", "Unix time at which the own certificate expires", ["files"]
)


def set_model(revision: str, dtype: str, name: str = "") -> None:
    """Says what is served from now on; only the router knows it by a name."""
    MODEL.clear()
    MODEL.labels(name, revision, dtype).set(1)
