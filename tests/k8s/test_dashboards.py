"""Dashboards are those that k8s/draw_dashboards.py gives, and ask for what there is."""

import json

import pytest

from k8s.draw_dashboards import DASHBOARDS, FOLDER
from k8s.grafana import Dashboard, as_json, in_namespace
from tests.k8s.promql import unknown_metrics


def by_name(dashboard: Dashboard) -> str:
    return dashboard.name


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=by_name)
def test_files_are_those_that_the_code_gives(dashboard: Dashboard) -> None:
    written = (FOLDER / f"{dashboard.name}.json").read_text()

    assert written == as_json(dashboard), "run `python -m k8s.draw_dashboards`"


def test_no_file_is_left_over() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == {dashboard.name for dashboard in DASHBOARDS}


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=by_name)
def test_queries_ask_for_metrics_that_there_are(dashboard: Dashboard) -> None:
    assert not unknown_metrics(json.dumps([list(panel.queries.values()) for panel in dashboard.panels]))


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=by_name)
def test_panels_lie_beside_and_below_each_other(dashboard: Dashboard) -> None:
    cells = [
        (x, y)
        for panel in json.loads(as_json(dashboard))["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]

    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24


@pytest.mark.parametrize(
    ("query", "narrowed"),
    [
        ("sum(pagoda_a_b)", 'sum(pagoda_a_b{namespace=~"$namespace"})'),
        ('pagoda_a{b="c"}', 'pagoda_a{namespace=~"$namespace", b="c"}'),
        (
            "pagoda:a:b / process_c",
            'pagoda:a:b{namespace=~"$namespace"} / process_c{namespace=~"$namespace"}',
        ),
    ],
)
def test_a_query_is_narrowed_to_the_namespace(query: str, narrowed: str) -> None:
    assert in_namespace(query) == narrowed
