"""JSON as its standard has it: Python's own reader also takes NaN and infinities."""

import json
from typing import Any, NoReturn


def loads(text: str) -> Any:
    """What `text` says.

    Raises:
        ValueError: it isn't JSON.
        RecursionError: it is nested too deep.
    """
    return json.loads(text, parse_constant=_refuse)


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")
