"""Writes the results into docs/performance.md, and its plot: `python -m benchmarks.document`.

Each benchmark's newest file in benchmarks/results counts. A table stands between `<!-- results: NAME -->` and
`<!-- end of results -->`; a test compares.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.command import BareParser, failing_in_one_line
from benchmarks.plot import pyplot
from benchmarks.results import FOLDER, ROOT

DOCUMENT: Final = ROOT / "docs" / "performance.md"
PLOT: Final = ROOT / "docs" / "images" / "performance.png"
NAMES: Final = ("throughput", "latency", "serving", "http", "startup", "router", "kernels", "gpu")
PLOTTED: Final = NAMES[:5]
_PLACE: Final = re.compile(r"(<!-- results: (\w+) -->\n).*?(<!-- end of results -->)", re.DOTALL)

Lines = list[dict[str, Any]]


def newest(name: str, folder: Path = FOLDER) -> Lines | None:
    """The lines of a benchmark's latest full run, the circumstances first; None if there is none."""
    for path in sorted(folder.glob(f"{name}-????-??-??.jsonl"), reverse=True):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        if len(lines) > 1 and not lines[0]["flags"].get("quick"):
            return lines
    return None


def table(lines: Lines | None) -> str:
    """Where and when it was measured, and a row per comparison."""
    if not lines:
        return "Not measured yet."
    head, *rows = lines
    hardware = head["hardware"]
    where = f"{hardware['cores']} cores of {hardware['cpu']}, {hardware['memory_gib']:.0f} GiB"
    where += f", {hardware['gpu']}" if "gpu" in hardware else ""
    said = (
        f"{head['date']}, commit `{head['commit']}`, {where}; Python {head['python']}, torch {head['torch']}"
    )
    if "gpu" not in hardware and not head.get("cpu_kernels", True):
        said += "; without compiled CPU kernels"
    cells = [("What", "Ours", "Other", "Ratio", "Of the limit"), ("---", "---:", "---:", "---:", "---:")]
    for row in rows:
        unit = row["unit"]
        other = _number(row["peer"], unit)
        cells.append(
            (
                row["name"] + _model(row, rows),
                _number(row["ours"], unit),
                other,
                "" if row["ratio"] is None else f"{row['ratio']:.2f}",
                "" if row["limit_fraction"] is None else f"{row['limit_fraction']:.0%}".replace("%", " %"),
            )
        )
    return said + ".\n\n" + "\n".join("| " + " | ".join(line) + " |" for line in cells)


def _model(row: dict[str, Any], rows: Lines) -> str:
    """The model, where several were measured."""
    models = {one.get("model") for one in rows}
    return f" ({row['model']})" if len(models) > 1 and row.get("model") else ""


def _number(value: float | None, unit: str) -> str:
    return "" if value is None else f"{value:,.{_decimals(value)}f} {unit}"


def _decimals(value: float) -> int:
    return next((decimals for least, decimals in ((100, 0), (10, 1), (1, 2), (0.1, 3)) if value >= least), 4)


def plot_link(plotted: bool) -> str:
    """The picture, once there is one."""
    return (
        "![How many times better than each peer](images/performance.png)" if plotted else "Not measured yet."
    )


def generated(text: str, folder: Path = FOLDER) -> str:
    """`text` with every table as the results have it now."""

    def fill(match: re.Match[str]) -> str:
        found = plot_link(bool(ratios(folder))) if match[2] == "plot" else table(newest(match[2], folder))
        return f"{match[1]}{found}\n{match[3]}"

    return _PLACE.sub(fill, text)


def places(text: str) -> list[str]:
    """The names that `text` has a place for."""
    return [match[2] for match in _PLACE.finditer(text)]


def ratios(folder: Path = FOLDER) -> list[tuple[str, float]]:
    """What the plot shows."""
    found = []
    for name in PLOTTED:
        rows = (newest(name, folder) or [])[1:]
        found += [(row["name"], row["ratio"]) for row in rows if row["ratio"]]
    return found


def plot(shown: Sequence[tuple[str, float]], path: Path) -> None:
    """Bars from 1, which is as good as the peer."""
    names = [name for name, _ in reversed(shown)]
    values = [value for _, value in reversed(shown)]
    figure, axes = pyplot().subplots(figsize=(9, 0.6 + 0.3 * len(shown)), dpi=130)
    colours = ["tab:blue" if value >= 1 else "tab:orange" for value in values]
    bars = axes.barh(names, [value - 1 for value in values], left=1, color=colours)
    axes.bar_label(bars, [f" {value:.2f} " for value in values], fontsize=8)
    axes.set_xscale("log")
    axes.axvline(1, color="grey", linewidth=1)
    axes.set_xlabel("times as good as the other (log scale)")
    axes.tick_params(axis="y", labelsize=8)
    axes.margins(x=0.15)
    figure.tight_layout()
    figure.savefig(path)
    pyplot().close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    """Rewrites the page and the picture."""
    parser = BareParser("document", __doc__)
    parser.parse_args(arguments)
    with failing_in_one_line(parser.prog):
        if shown := ratios():
            plot(shown, PLOT)
        DOCUMENT.write_text(generated(DOCUMENT.read_text()))


if __name__ == "__main__":
    main()
