"""Writes the tables of docs/ that the code knows better: `python -m tests.docs.generate`.

A table stands between `<!-- table: NAME -->` and `<!-- end of table -->`; the test beside this file compares.
"""

import dataclasses
import re
import types
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

from prometheus_client import REGISTRY
from prometheus_client.metrics import MetricWrapperBase

import common.metrics
import router.metrics
import scheduler.metrics
import shard.metrics
from common.config import Bounds
from launcher.config import ChatConfig, ServeConfig
from launcher.ranks import RanksConfig
from router.config import RouterConfig
from scheduler.config import SchedulerConfig
from shard.config import ShardConfig

ROOT = Path(__file__).parents[2]
# By the name in PAGODA_<NAME>_…, which is also the YAML section.
CONFIGS: dict[str, type[Any]] = {
    "launcher": ServeConfig,
    "chat": ChatConfig,
    "ranks": RanksConfig,
    "router": RouterConfig,
    "scheduler": SchedulerConfig,
    "shard": ShardConfig,
}
METRICS: dict[str, types.ModuleType] = {
    "every process": common.metrics,
    "router": router.metrics,
    "scheduler": scheduler.metrics,
    "shard": shard.metrics,
}
UNITS = ("blocks", "bytes", "ratio", "requests", "seconds", "sequences", "slots", "tokens")
_TABLE = re.compile(r"(<!-- table: (.+?) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def flag(name: str) -> str:
    """The flag of a dataclass field."""
    return "--" + name.replace("_", "-")


def flag_table(config: type[Any]) -> str:
    """One row per option of a process."""
    hints = get_type_hints(config)
    rows = [
        (f"`{flag(field.name)}`", _default(field), _values(field, hints[field.name]), _bounds(field).help)
        for field in dataclasses.fields(config)
    ]
    return _table(("Flag", "Default", "Values", "Meaning"), rows)


def metric_table(module: types.ModuleType) -> str:
    """One row per metric of the collectors that a process's module holds and /metrics asks."""
    registered = {id(collector) for collector in REGISTRY._collector_to_names}
    rows = []
    for collector in vars(module).values():
        if id(collector) not in registered:
            continue
        # A metric with labels but no values yet describes itself without them.
        labels = collector._labelnames if isinstance(collector, MetricWrapperBase) else None
        for metric in collector.describe() if labels is not None else collector.collect():
            names = metric._labelnames if labels is None else labels
            rows.append(
                (
                    f"`{metric.name}{'_total' if metric.type == 'counter' else ''}`",
                    metric.type,
                    ", ".join(f"`{name}`" for name in names),
                    _unit(metric.name),
                    metric.documentation.rstrip("."),
                )
            )
    return _table(("Metric", "Type", "Labels", "Unit", "Meaning"), rows)


def _unit(name: str) -> str:
    """The last word of a name that is one."""
    return next((word for word in reversed(name.split("_")) if word in UNITS), "")


TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "docs/operations.md": {
        f"flags of {name}": partial(flag_table, config) for name, config in CONFIGS.items()
    },
    "docs/metrics.md": {
        f"metrics of {name}": partial(metric_table, module) for name, module in METRICS.items()
    },
}


def generated(page: str) -> str:
    """A page with every table as the code has it now."""
    tables = TABLES[page]
    return _TABLE.sub(lambda match: f"{match[1]}{tables[match[2]]()}\n{match[3]}", (ROOT / page).read_text())


def tables_in(text: str) -> list[str]:
    """The names of the tables that `text` has a place for."""
    return [match[2] for match in _TABLE.finditer(text)]


def _bounds(field: "dataclasses.Field[Any]") -> Bounds:
    bounds: Bounds = field.metadata["bounds"]
    return bounds


def _default(field: "dataclasses.Field[Any]") -> str:
    if field.default is dataclasses.MISSING:
        return "required"
    if isinstance(field.default, bool):
        return "on" if field.default else "off"
    if isinstance(field.default, float):
        return f"`{field.default:g}`"
    return "unset" if field.default is None else f"`{field.default}`"


def _values(field: "dataclasses.Field[Any]", kind: Any) -> str:
    bounds = _bounds(field)
    if bounds.choices:
        return ", ".join(f"`{choice}`" for choice in bounds.choices)
    if kind == tuple[str, ...]:
        return "comma-separated"
    limits = ""
    if bounds.minimum is not None and bounds.maximum is not None:
        limits = f"{_number(bounds.minimum)} to {_number(bounds.maximum)}"
    elif bounds.minimum is not None:
        limits = f"at least {_number(bounds.minimum)}"
    unit = bounds.unit.removesuffix("s") if limits == "at least 1" else bounds.unit
    return f"{limits} {unit}".strip()


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


if __name__ == "__main__":
    for page in TABLES:
        (ROOT / page).write_text(generated(page))
