"""Draws a dashboard's file: each panel in its place, with what its queries find."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.plot import pyplot

Series = tuple[Mapping[str, str], Sequence[tuple[float, float]]]
"""Labels, and values by time in seconds."""

# Of Grafana's units: what a value is divided by, and what stands behind it.
UNITS: Final[Mapping[str, Mapping[str, float]]] = {
    "short": {"": 1, " K": 1e3, " Mil": 1e6, " Bil": 1e9},
    "s": {" µs": 1e-6, " ms": 1e-3, " s": 1, " min": 60, " hour": 3600},
    "percentunit": {"%": 0.01},
    "reqps": {" req/s": 1},
    "bytes": {" B": 1, " KiB": 2**10, " MiB": 2**20, " GiB": 2**30},
    "Bps": {" B/s": 1, " kB/s": 1e3, " MB/s": 1e6, " GB/s": 1e9},
}
# In inches: a cell of the grid, the room around a panel's axes, a line of its legend.
_CELL: Final = (0.58, 0.37)
_LEFT, _RIGHT, _ABOVE, _BELOW, _LINE = 0.75, 0.2, 0.3, 0.3, 0.16
# Of a legend, in characters.
_WIDTH: Final = 64


def filled(query: str, rate_interval_s: int) -> str:
    """A query with every namespace chosen, as Grafana sends it."""
    return query.replace("$__rate_interval", f"{rate_interval_s}s").replace("$namespace", ".*")


def legend(template: str, labels: Mapping[str, str]) -> str:
    """With the labels' values; of a label that isn't there, nothing."""
    return re.sub(r"{{\s*(\w+)\s*}}", lambda match: labels.get(match[1], ""), template)


def shown(value: float, unit: str) -> str:
    """A value as an axis has it."""
    scales = list(UNITS[unit].items())
    fitting = [one for one in scales if one[1] <= abs(value) * (1 + 1e-9)]
    suffix, scale = (fitting or scales)[-1 if fitting else 0]
    return f"{value / scale:.4g}{suffix}" if value else "0"


def place(panel: Mapping[str, Any]) -> tuple[float, float, float, float]:
    """Of a panel, in inches from the upper left: x, y, width and height."""
    x, y, width, height = (panel["gridPos"][one] for one in "xywh")
    return x * _CELL[0], y * _CELL[1], width * _CELL[0], height * _CELL[1]


def draw(
    dashboard: Mapping[str, Any], find: Callable[[str], Sequence[Series]], seconds: float, path: Path
) -> list[str]:
    """Writes a PNG of what `find` gives for each query in the first `seconds`.

    Returns the titles of panels that are empty.
    """
    from PIL import Image

    places = [place(panel) for panel in dashboard["panels"]]
    size = max(x + width for x, _, width, _ in places), max(y + height for _, y, _, height in places)
    figure = pyplot().figure(figsize=size, dpi=90)
    empty = []
    for panel, (x, y, width, height) in zip(dashboard["panels"], places, strict=True):
        lines = [
            (legend(target["legendFormat"], labels), dict(points))
            for target in panel["targets"]
            for labels, points in find(target["expr"])
        ]
        columns = max(_WIDTH // (max((len(name) for name, _ in lines), default=0) + 6), 1)
        below = _BELOW + _LINE * math.ceil(len(lines) / columns)
        left, bottom = x + _LEFT, size[1] - y - height + below
        inner = width - _LEFT - _RIGHT, height - _ABOVE - below
        axes = figure.add_axes(
            (left / size[0], bottom / size[1], inner[0] / size[0], inner[1] / size[1]), title=panel["title"]
        )
        axes.set_xlim(0, seconds)
        _draw_lines(axes, panel["fieldConfig"]["defaults"], lines)
        if lines:
            corner = ((x + 0.1) / size[0], (bottom - _BELOW + 0.06) / size[1])
            axes.legend(
                loc="upper left",
                bbox_to_anchor=corner,
                bbox_transform=figure.transFigure,
                ncols=columns,
                fontsize=8,
                frameon=False,
                labelspacing=0.2,
                columnspacing=1,
                handlelength=1,
                borderaxespad=0,
                borderpad=0,
            )
        else:
            axes.text(0.5, 0.5, "No data", transform=axes.transAxes, ha="center")
            empty.append(panel["title"])
    figure.savefig(path)
    pyplot().close(figure)
    # A palette makes it half as large.
    with Image.open(path) as drawn:
        drawn.convert("RGB").quantize(256).save(path, optimize=True)
    return empty


def _draw_lines(
    axes: Any, defaults: Mapping[str, Any], lines: Sequence[tuple[str, Mapping[float, float]]]
) -> None:
    """With the axes of a panel's unit."""
    from matplotlib.ticker import MaxNLocator, MultipleLocator

    unit = defaults["unit"]
    times = sorted({at for _, points in lines for at in points})
    if lines and "stacking" in defaults.get("custom", {}):
        values = [[points.get(at, 0) for at in times] for _, points in lines]
        axes.stackplot(times, values, labels=[name for name, _ in lines], alpha=0.7)
    else:
        for name, points in lines:
            axes.plot(times, [points.get(at, math.nan) for at in times], linewidth=1.3, label=name)
    highest = axes.dataLim.ymax
    axes.set_ylim(defaults["min"], highest * 1.06 if 0 < highest < math.inf else 1)
    # Of bytes, powers of two.
    step = 2 ** math.ceil(math.log2(axes.get_ylim()[1] / 5))
    round_steps = MaxNLocator(5, steps=[1, 2, 2.5, 5, 10])
    axes.yaxis.set_major_locator(MultipleLocator(step) if unit == "bytes" else round_steps)
    axes.yaxis.set_major_formatter(lambda value, _: shown(value, unit))
    axes.xaxis.set_major_formatter(lambda value, _: f"{int(value) // 60}:{int(value) % 60:02}")
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 1.5, 3, 6, 10], integer=True))
    axes.title.set(fontsize=9.5, fontweight="bold")
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)
