"""Strings that are text: JSON's escapes can also write halves of characters, which UTF-8 has no bytes for."""

import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

from router.errors import invalid

# Of a field's name in an error: a client may nest as deep as it likes, under keys as long as it likes.
_MAX_PARTS: Final = 8
_MAX_KEY_LENGTH: Final = 40

_WITH_TEXT: Final = frozenset({str, dict, list})
_SURROGATE: Final = re.compile("[\ud800-\udfff]")


def field_name(path: Sequence[str | int]) -> str:
    """As in `messages[0].content`."""
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return name.lstrip(".")


def check_text(given: Any, field: str = "") -> None:
    """Refuses a JSON value in which a string or a key holds half of a surrogate pair.

    Raises:
        RequestError: INVALID_ARGUMENT, naming the part of `field`, or of a body.
    """
    # Not by recursion: values may be nested as deep as the stack. Each comes with its path, last part first.
    waiting: list[tuple[Any, Any]] = [((), given)]
    while waiting:
        path, value = waiting.pop()
        items: Iterable[tuple[Any, Any]] = ()
        if isinstance(value, str):
            _check(value, path, field)
        elif isinstance(value, dict):
            items = value.items()
            for key in value:
                _check(key, (key, path), field)
        elif isinstance(value, list):
            items = enumerate(value)
        waiting += [((key, path), one) for key, one in items if type(one) in _WITH_TEXT]


def _check(text: str, path: Any, field: str) -> None:
    if text.isascii() or not (found := _SURROGATE.search(text)):
        return
    parts: list[str | int] = []
    while path:
        part, path = path
        parts.append(part if isinstance(part, int) else _printable(part[:_MAX_KEY_LENGTH]))
    where = field_name([field, *parts[: -_MAX_PARTS - 1 : -1]])
    message = f"{_printable(found[0])} at character {found.start()} is half of a surrogate pair, not text"
    raise invalid(where, message)


def _printable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()
