"""Writes what follows from the chart, and what the chart has from elsewhere: `python -m tests.helm.generate`.

The test beside this file compares.
"""

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml

from common.config import Bounds
from router.config import RouterConfig
from scheduler.config import SchedulerConfig
from shard.config import ShardConfig
from tests.helm.chart import CHART, render
from tests.helm.tools import ROOT

README = CHART / "README.md"
SCHEMA = CHART / "values.schema.json"
MANIFESTS = ROOT / "k8s" / "pagoda.yaml"
COPIED = ("dashboards", "rules")
CONFIGS: dict[str, type[Any]] = {
    "router": RouterConfig,
    "scheduler": SchedulerConfig,
    "shard": ShardConfig,
}
# Options that follow from other values, or that a pod has no use for.
TAKEN = {
    *("model", "served_model_name", "scheduler_addresses", "shard_addresses", "listen_address"),
    *("http_address", "metrics_address", "gateway_address", "block_map_address", "api_keys_file", "insecure"),
    *("drain_delay", "shutdown_grace", "exit_with_parent", "tensor_parallel_size", "rank", "rendezvous_host"),
}
_JSON_TYPES = {bool: "boolean", int: "integer", float: "number"}
_TABLE = re.compile(r"(<!-- table: values -->\n).*?(<!-- end of table -->)", re.DOTALL)


def options_schema(config: type[Any]) -> dict[str, Any]:
    """What a process's `options` may be: flags that it has, within their limits."""
    hints = get_type_hints(config)
    properties = {
        field.name.replace("_", "-"): _option_schema(hints[field.name], field.metadata["bounds"])
        for field in dataclasses.fields(config)
        if field.name not in TAKEN and "tls_" not in field.name
    }
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _option_schema(hint: Any, bounds: Bounds) -> dict[str, Any]:
    if bounds.choices:
        return {"enum": list(bounds.choices)}
    kinds = [kind for kind in (get_args(hint) or (hint,)) if kind is not type(None)]
    limits = {"minimum": bounds.minimum, "maximum": bounds.maximum}
    return {
        "type": _JSON_TYPES.get(kinds[0], "string"),
        **{name: limit for name, limit in limits.items() if limit is not None},
    }


def schema(text: str, source: str) -> str:
    """values.schema.json with the options as the processes have them, and the values of values.yaml."""
    document = json.loads(text)
    for name, config in CONFIGS.items():
        document["$defs"][f"{name}Options"] = options_schema(config)
    _require(document, yaml.safe_load(source))
    return json.dumps(document, indent=2) + "\n"


def _require(node: dict[str, Any], defaults: dict[str, Any]) -> None:
    """Asks for every value that has a default: only who sets it to null takes it away.

    Requests and limits may be taken away.
    """
    if "properties" not in node or "requests" in defaults:
        return
    node["required"] = sorted(defaults)
    for name, value in defaults.items():
        if isinstance(value, dict):
            _require(node["properties"][name], value)


def values(text: str) -> Iterator[tuple[str, str, str]]:
    """Name, default and meaning of each value of values.yaml that a comment of two dashes stands above."""
    defaults = yaml.safe_load(text)
    path: list[str] = []
    comment: list[str] = []
    for line in text.splitlines():
        if match := re.match(r" *# (-- )?(.*)", line):
            comment = [match[2]] if match[1] else [*comment, match[2]] if comment else []
        elif match := re.match(r"( *)(\w+):", line):
            path[len(match[1]) // 2 :] = [match[2]]
            if comment:
                value = defaults
                for name in path:
                    value = value[name]
                yield ".".join(path), json.dumps(value), " ".join(comment)
            comment = []


def readme(text: str, source: str) -> str:
    """README.md with the table as values.yaml has it now."""
    rows = [f"| `{name}` | `{default}` | {meaning} |" for name, default, meaning in values(source)]
    table = "\n".join(["| Value | Default | Meaning |", "| --- | --- | --- |", *rows])
    return _TABLE.sub(lambda match: f"{match[1]}{table}\n{match[2]}", text)


def manifests() -> str:
    """The plain manifests: the chart with values-cpu.yaml."""
    head = "# Made from helm/pagoda with values-cpu.yaml, by `python -m tests.helm.generate`.\n"
    # Helm has no part in what is applied from them.
    marks = r"\n *(# Source|helm\.sh/chart|app\.kubernetes\.io/managed-by): .*"
    return head + re.sub(marks, "", render("values-cpu.yaml", namespace="default"))


def copies() -> dict[Path, bytes]:
    """The dashboards and rules of `k8s/`, where the chart has them: Helm reads nothing outside of it."""
    return {
        CHART / "files" / folder / source.name: source.read_bytes()
        for folder in COPIED
        for source in sorted((ROOT / "k8s" / folder).glob("*"))
    }


def copied() -> dict[Path, bytes]:
    """What the chart has of them now."""
    return {path: path.read_bytes() for folder in COPIED for path in (CHART / "files" / folder).glob("*")}


def main() -> None:
    """Writes all of it."""
    SCHEMA.write_text(schema(SCHEMA.read_text(), (CHART / "values.yaml").read_text()))
    README.write_text(readme(README.read_text(), (CHART / "values.yaml").read_text()))
    for path in copied():
        path.unlink()
    for path, content in copies().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    MANIFESTS.write_text(manifests())


if __name__ == "__main__":
    main()
