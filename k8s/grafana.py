"""Dashboards as Grafana reads them.

A panel is a title, a unit of Grafana's, and PromQL by legend. Every query gets the chosen namespace.
"""

import json
import re
from dataclasses import dataclass
from typing import Any, Final

_DATASOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
# Of Grafana's 24 columns, three panels share a row.
_WIDTH, _HEIGHT, _PER_ROW = 8, 7, 3


@dataclass(frozen=True)
class Panel:
    """Lines over time. `queries` are PromQL by legend, in which {{label}} stands for a label's value."""

    title: str
    unit: str
    queries: dict[str, str]
    stacked: bool = False


@dataclass(frozen=True)
class Dashboard:
    """What one page shows; `name` is its file's and its address's."""

    name: str
    title: str
    panels: tuple[Panel, ...]


def rate(metric: str, by: str = "") -> str:
    """A counter per second, summed up by labels."""
    return f"sum by ({by}) (rate({metric}[$__rate_interval]))"


def mean(histogram: str, by: str = "") -> str:
    """What was observed, on average."""
    return f"{rate(histogram + '_sum', by)} / {rate(histogram + '_count', by)}"


def quantiles(histogram: str, by: str = "", *shown: float) -> dict[str, str]:
    """The median and the 99th percentile, or those `shown`, by legend."""
    legend = "".join(f" {{{{{label}}}}}" for label in filter(None, by.split(", ")))
    per_bucket = rate(histogram + "_bucket", ", ".join(filter(None, ("le", by))))
    return {f"p{q * 100:g}{legend}": f"histogram_quantile({q}, {per_bucket})" for q in shown or (0.5, 0.99)}


def in_namespace(query: str) -> str:
    """A query of the chosen namespace's series alone."""
    selector = 'namespace=~"$namespace"'
    return re.sub(
        r"\b((?:pagoda[_:]|process_)[\w:]+)(\{?)",
        lambda match: f"{match[1]}{{{selector}" + (", " if match[2] else "}"),
        query,
    )


def as_json(dashboard: Dashboard) -> str:
    """The file that Grafana reads."""
    panels = [_panel(number, panel) for number, panel in enumerate(dashboard.panels)]
    document = {
        "uid": dashboard.name,
        "title": dashboard.title,
        "tags": ["pagoda"],
        "schemaVersion": 39,
        "editable": False,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_datasource_variable(), _namespace_variable()]},
        "links": [
            {
                "type": "dashboards",
                "title": "Pagoda",
                "tags": ["pagoda"],
                "asDropdown": True,
                "keepTime": True,
            }
        ],
        "panels": panels,
    }
    return json.dumps(document, indent=1) + "\n"


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    row, column = divmod(number, _PER_ROW)
    stacking = {"custom": {"stacking": {"mode": "normal"}, "fillOpacity": 30}} if panel.stacked else {}
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "datasource": _DATASOURCE,
        "gridPos": {"x": column * _WIDTH, "y": row * _HEIGHT, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, **stacking}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _DATASOURCE,
                "expr": in_namespace(query),
                "legendFormat": legend,
            }
            for index, (legend, query) in enumerate(panel.queries.items())
        ],
    }


def _datasource_variable() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"}


def _namespace_variable() -> dict[str, Any]:
    return {
        "name": "namespace",
        "type": "query",
        "label": "Namespace",
        "datasource": _DATASOURCE,
        "query": "label_values(pagoda_build_info, namespace)",
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        # Also where series have no namespace.
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }
