"""Recording and alerting rules, as Prometheus reads them."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.docs.pages import PAGES, prose
from tests.k8s.promql import ROOT, RULES, rules, unknown_metrics
from tests.tools import find_tool

TESTS = Path(__file__).with_name("rules.yaml")
ALERTS = sorted({rule["alert"] for rule in rules() if "alert" in rule})


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [find_tool("promtool", "prometheus"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_prometheus_takes_the_rules() -> None:
    done = promtool("check", "rules", *(str(path) for path in RULES.glob("*.yaml")))

    assert done.returncode == 0, done.stdout + done.stderr


def test_alerts_fire_on_what_they_are_for() -> None:
    done = promtool("test", "rules", str(TESTS))

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("alert", ALERTS)
def test_each_alert_is_seen_to_fire(alert: str) -> None:
    cases = [case for test in yaml.safe_load(TESTS.read_text())["tests"] for case in test["alert_rule_test"]]

    assert [case for case in cases if case["alertname"] == alert and case["exp_alerts"]]


@pytest.mark.parametrize("alert", ALERTS)
def test_each_alert_has_a_runbook_that_names_it(alert: str) -> None:
    for rule in rules():
        if rule.get("alert") == alert:
            assert alert in (ROOT / rule["annotations"]["runbook"]).read_text()


def test_the_alerts_are_those_that_operators_are_told_of() -> None:
    listed = re.findall(r"`(Pagoda\w+)`", prose("docs/operations.md"))

    assert sorted(listed) == ALERTS


def test_each_runbook_has_an_alert() -> None:
    linked = {rule["annotations"]["runbook"] for rule in rules() if "alert" in rule}

    assert linked == {page for page in PAGES if page.startswith("docs/runbooks/")}


@pytest.mark.parametrize("rule", list(rules()), ids=lambda rule: rule.get("alert") or rule["record"])
def test_rules_ask_for_metrics_that_there_are(rule: dict[str, str]) -> None:
    assert not unknown_metrics(rule["expr"])
