"""Dashboards become pictures: queries as Grafana sends them, panels where the file has them."""

import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import dashboards
from benchmarks.panels import UNITS, Series, draw, filled, legend, place, shown
from benchmarks.plot import pyplot
from k8s.draw_dashboards import DASHBOARDS
from tests.tools import find_tool

Capture = pytest.CaptureFixture[str]

needs_matplotlib = pytest.mark.skipif(
    not importlib.util.find_spec("matplotlib"), reason="the extra `bench` is not installed"
)


def panel(title: str, x: int, y: int, stacked: bool = False) -> dict[str, Any]:
    custom = {"custom": {"stacking": {"mode": "normal"}}} if stacked else {}
    return {
        "title": title,
        "gridPos": {"x": x, "y": y, "w": 8, "h": 7},
        "fieldConfig": {"defaults": {"unit": "s", "min": 0, **custom}},
        "targets": [{"expr": title, "legendFormat": "{{instance}}"}],
    }


def two_lines(query: str) -> Sequence[Series]:
    if query == "empty":
        return []
    return [({"instance": "a"}, [(0.0, 1.0), (2.0, 2.0)]), ({"instance": "b"}, [(2.0, 3.0)])]


def test_a_query_is_asked_of_all_namespaces_and_over_the_interval() -> None:
    query = 'rate(pagoda_a{namespace=~"$namespace"}[$__rate_interval])'

    assert filled(query, 8) == 'rate(pagoda_a{namespace=~".*"}[8s])'


def test_no_variable_of_the_dashboards_is_left() -> None:
    for file in sorted(dashboards.SOURCES.glob("*.json")):
        queries = [one["expr"] for each in json.loads(file.read_text())["panels"] for one in each["targets"]]

        # Of a label_replace, groups stay.
        assert not [query for query in queries if "$" in filled(query, 8).replace('"$1"', "")]


def test_a_legend_has_the_labels_values() -> None:
    assert legend("{{ code }} of {{missing}}", {"code": "OK"}) == "OK of "


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0, "s", "0"),
        (0.025, "s", "25 ms"),
        (90, "s", "1.5 min"),
        (0.5, "percentunit", "50%"),
        (0.5, "reqps", "0.5 req/s"),
        (96 << 20, "bytes", "96 MiB"),
        (2e6, "Bps", "2 MB/s"),
        (1500, "short", "1.5 K"),
        (0.25, "short", "0.25"),
    ],
)
def test_a_value_has_its_unit(value: float, unit: str, text: str) -> None:
    assert shown(value, unit) == text


def test_every_unit_of_the_dashboards_is_known() -> None:
    assert {each.unit for dashboard in DASHBOARDS for each in dashboard.panels} <= UNITS.keys()


@needs_matplotlib
def test_panels_are_drawn_where_the_file_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    panels = [panel("left", 0, 0), panel("stacked", 8, 0, stacked=True), panel("below", 0, 7)]
    drawn: list[Any] = []
    monkeypatch.setattr(pyplot(), "close", drawn.append)

    draw({"panels": panels}, two_lines, 10, tmp_path / "drawn.png")

    [figure] = drawn
    left, stacked, below = figure.axes
    assert [axes.get_title() for axes in figure.axes] == ["left", "stacked", "below"]
    assert left.bbox.y0 == stacked.bbox.y0 > below.bbox.y1
    assert left.bbox.x0 == below.bbox.x0
    assert left.bbox.x1 < stacked.bbox.x0
    assert stacked.bbox.x0 - left.bbox.x0 == pytest.approx(place(panels[1])[0] * figure.dpi)
    # What is stacked reaches 2 + 3.
    assert [axes.dataLim.ymax for axes in figure.axes] == [3, 5, 3]
    assert [text.get_text() for text in left.get_legend().get_texts()] == ["a", "b"]


@needs_matplotlib
def test_a_panel_without_data_is_named(tmp_path: Path) -> None:
    panels = [panel("full", 0, 0), panel("empty", 8, 0)]

    assert draw({"panels": panels}, two_lines, 10, tmp_path / "drawn.png") == ["empty"]


@needs_matplotlib
@pytest.mark.e2e
def test_a_short_load_gives_a_picture_of_each_dashboard(tmp_path: Path, capsys: Capture) -> None:
    find_tool("prometheus", "prometheus")

    dashboards.main(["--seconds=3", "--model-shape=tiny", "--dtype=float32", f"--output={tmp_path}"])

    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["dashboard"] for line in lines] == sorted(dashboard.name for dashboard in DASHBOARDS)
    assert {line["picture"] for line in lines} == {str(path) for path in tmp_path.iterdir()}
    for line in lines:
        assert Path(line["picture"]).read_bytes().startswith(b"\x89PNG")
        assert len(line["empty"]) < line["panels"]


def test_without_prometheus_it_ends_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(dashboards, "pyplot", lambda: None)

    with pytest.raises(SystemExit, match="1"):
        dashboards.main([])

    error = capsys.readouterr().err
    assert error.startswith(
        "python -m benchmarks.dashboards: --prometheus-address needs the program prometheus"
    )
    assert error.count("\n") == 1


def test_without_matplotlib_it_ends_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    with pytest.raises(SystemExit, match="1"):
        dashboards.main([])

    assert capsys.readouterr().err.startswith("python -m benchmarks.dashboards: plots need matplotlib")
