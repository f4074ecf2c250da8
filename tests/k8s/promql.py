"""The rules in k8s/rules, and which metrics PromQL names."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.docs.generate import METRICS, metric_table

ROOT = Path(__file__).parents[2]
RULES = ROOT / "k8s" / "rules"


def rules() -> Iterator[dict[str, Any]]:
    """Each rule of each group of each file."""
    for path in RULES.glob("*.yaml"):
        for group in yaml.safe_load(path.read_text())["groups"]:
            yield from group["rules"]


def unknown_metrics(text: str) -> set[str]:
    """Metrics and recorded series that `text` names and that nobody makes."""
    tables = "\n".join(metric_table(module) for module in METRICS.values())
    known = {rule["record"] for rule in rules() if "record" in rule}
    for name in re.findall(r"^\| `(\w+)` \|", tables, re.MULTILINE):
        known |= {name, f"{name}_bucket", f"{name}_sum", f"{name}_count"}
    return set(re.findall(r"\bpagoda[_:][\w:]+", text)) - known
