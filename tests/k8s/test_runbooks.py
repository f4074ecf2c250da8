"""Runbooks have steps, and commands that fit what the chart makes and what Prometheus reads."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.docs.pages import PAGES, blocks, prose
from tests.helm.chart import CHART, Object, container, objects, of_kind, pod_templates
from tests.helm.generate import values
from tests.k8s.test_rules import promtool

RUNBOOKS = [page for page in PAGES if page.startswith("docs/runbooks/")]


@pytest.fixture(scope="module")
def rendered() -> list[Object]:
    """What a release `pagoda` has."""
    return objects(tls__internal__certManager="true", replica__gpus=1, image__shard='"gpu"')


@pytest.mark.parametrize("page", RUNBOOKS)
def test_a_runbook_tells_what_to_do_step_by_step(page: str) -> None:
    text = PAGES[page].read_text()
    _, look, do = re.split(r"^## (?:Look at|Do)$", text, flags=re.MULTILINE)

    assert blocks(page, "sh") + blocks(page, "promql")
    for steps in (look, do):
        numbers = [int(number) for number in re.findall(r"^(\d+)\. ", steps, re.MULTILINE)]
        assert numbers == list(range(1, len(numbers) + 1))
        assert len(numbers) > 1


@pytest.mark.parametrize("page", RUNBOOKS)
def test_prometheus_takes_the_queries(page: str, tmp_path: Path) -> None:
    queries = [query for block in blocks(page, "promql") for query in block.splitlines()]
    recorded = [{"record": f"query:{number}", "expr": query} for number, query in enumerate(queries)]
    file = tmp_path / "queries.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": recorded}]}))

    done = promtool("check", "rules", str(file))

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", RUNBOOKS)
def test_commands_name_what_a_release_has(page: str, rendered: list[Object]) -> None:
    names = {one["metadata"]["name"] for one in rendered}
    names |= {
        volume["secret"]["secretName"]
        for template in pod_templates(rendered)
        for volume in template["spec"]["volumes"]
        if "secret" in volume
    }
    names |= {f"{one['metadata']['name']}-0" for one in of_kind(rendered, "StatefulSet")}
    labels = {pair for template in pod_templates(rendered) for pair in template["metadata"]["labels"].items()}
    for block in blocks(page, "sh"):
        subprocess.run(["bash", "-n"], input=block, text=True, check=True)
        assert set(re.findall(r"(?<![\w.-])pagoda-[\w-]+", block)) <= names
        assert set(re.findall(r"(app\.kubernetes\.io/\w+)=([\w-]+)", block)) <= labels
        for name in re.findall(r"--container (\w+)", block):
            container(rendered, name)
        for port in re.findall(r"port-forward \S+ (\d+)", block):
            ports = [port["containerPort"] for port in container(rendered, "scheduler")["ports"]]
            assert int(port) in ports
            assert f":{port}/" in block


@pytest.mark.parametrize("page", PAGES)
def test_values_that_are_named_exist(page: str) -> None:
    there = {name for name, _, _ in values((CHART / "values.yaml").read_text())}
    groups = {name.rpartition(".")[0] for name in there}
    tops = "|".join({name.partition(".")[0] for name in there if "." in name})

    named = re.findall(rf"`((?:{tops})\.[a-z][\w.]*)[`:]", prose(page))

    others = {"model.safetensors", "tls.crt", "tls.key", "router.requests"}
    assert set(named) <= there | groups | others
