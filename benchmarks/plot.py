"""The figure of the paper's section 6.2: latency over request rate."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.command import BenchmarkError
from benchmarks.sustainable import Point

MARKERS = "osd^vx"


def pyplot() -> Any:
    """Matplotlib's, for files alone.

    Raises:
        BenchmarkError: it isn't installed.
    """
    try:
        import matplotlib as mpl
    except ModuleNotFoundError:
        raise BenchmarkError("plots need matplotlib, which `make bench` and `make test` install") from None
    mpl.use("Agg")
    from matplotlib import pyplot

    return pyplot


def plot_latency(curves: Mapping[str, Sequence[Point]], bound_s: float, title: str, path: Path) -> None:
    """Writes a PNG with one line per server."""
    figure, axes = pyplot().subplots(figsize=(8.5, 4.5), dpi=130)
    for marker, (name, points) in zip(MARKERS, curves.items(), strict=False):
        rates, latencies = zip(*points, strict=True)
        # The first one thick, as the second may lie on it.
        width = 4 if name == next(iter(curves)) else 1.5
        axes.plot(rates, latencies, marker=marker, markersize=4, linewidth=width, label=name)
    axes.axhline(bound_s, color="grey", linestyle=":", linewidth=1)
    axes.annotate(
        f"bound, {bound_s:g} s ",
        (1, bound_s),
        xycoords=("axes fraction", "data"),
        ha="right",
        va="bottom",
        color="grey",
        fontsize=8,
    )
    axes.set(xlabel="requests per second", ylabel="mean normalised latency, s per output token", title=title)
    axes.set_xlim(left=0)
    axes.set_ylim(0, 6 * bound_s)
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    figure.tight_layout()
    figure.savefig(path)
    pyplot().close(figure)
