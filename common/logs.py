"""One record per event on standard error. Prompt and output text never go there unless it is asked for."""

import json
import logging
import re
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Final

_PLAIN: Final = re.compile(r"[\w.:/+-]+")
_bound: ContextVar[Mapping[str, object] | None] = ContextVar("bound_log_fields", default=None)


def setup(process: str, level: str, log_format: str) -> None:
    """Sends every record to standard error, with the process's name, as "text" or "json" lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_add_bound_fields)
    handler.setFormatter(_JsonFormatter(process) if log_format == "json" else _TextFormatter(process))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def fields(**values: object) -> dict[str, Any]:
    """`extra` of a logging call: members of the JSON object, and `name=value` at the end of a text line.

    None, empty strings and empty containers are left out.
    """
    return {"fields": values}


def bind(**values: object) -> None:
    """Gives these fields to all further records of this task, and of the tasks that it starts."""
    _bound.set({**(_bound.get() or {}), **values})


def _add_bound_fields(record: logging.LogRecord) -> bool:
    values = {**(_bound.get() or {}), **getattr(record, "fields", {})}
    record.fields = {name: value for name, value in values.items() if value not in (None, "", [], {})}
    return True


class _TextFormatter(logging.Formatter):
    """For people: time of day, process, level, message, fields; a traceback on lines of its own."""

    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s {process} %(levelname)s %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        values: Mapping[str, object] = vars(record)["fields"]
        return " ".join(
            [super().formatMessage(record), *(f"{name}={_text(value)}" for name, value in values.items())]
        )


def _text(value: object) -> str:
    return value if isinstance(value, str) and _PLAIN.fullmatch(value) else json.dumps(value)


class _JsonFormatter(logging.Formatter):
    """For programs: one object on one line, whatever the message holds."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds")
        line: dict[str, object] = {
            "time": moment.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
            **vars(record)["fields"],
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)
