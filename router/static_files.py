"""The files of web pages, and the headers that fence them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

# A page loads and asks nothing but what comes from where it came from, and makes no markup out of text.
HEADERS: Final[Mapping[str, str]] = {
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
FOLDER: Final = Path(__file__).parent / "static"

_CONTENT_TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True)
class StaticFile:
    """What one path answers with."""

    content_type: str
    body: bytes


def read_page(name: str) -> dict[str, StaticFile]:
    """The files of a page by name, with those that all pages share; no request reads any."""
    return {
        file.name: StaticFile(_CONTENT_TYPES[file.suffix], file.read_bytes())
        for folder in (FOLDER / "shared", FOLDER / name)
        for file in folder.iterdir()
    }
