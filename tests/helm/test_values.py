"""Wrong values are refused at installation, and what is made from values and code is as they are now."""

import json
from typing import Any

import jsonschema
import pytest
import yaml

from tests.helm import generate
from tests.helm.chart import CHART, RenderError, container, objects, render


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"router__replica": 2}, "additional properties 'replica' not allowed"),
        ({"router__replicas": '"two"'}, "got string, want integer"),
        ({"replica__scheduler__options": '{"max-num-seq": 1}'}, "additional properties 'max-num-seq'"),
        ({"replica__scheduler__options": '{"max-num-seqs": 0}'}, "minimum: got 0, want 1"),
        ({"replica__shard__options": '{"dtype": "int3"}'}, "value must be one of 'auto', 'float32'"),
        ({"replica__shard__options": '{"listen-address": "0.0.0.0:1"}'}, "'listen-address' not allowed"),
        ({"replica__shard__resources": '{"limits": {"memory": "8GB"}}'}, "'8GB' does not match pattern"),
        ({"model__source": '"git"'}, "value must be one of 'claim', 'hostPath', 'download'"),
        ({"model__source": '"hostPath"'}, 'model.hostPath "" must be an absolute path'),
        ({"model__source": '"download"'}, "model.files is empty"),
        ({"model__claim": '""'}, "model.claim is empty"),
        ({"model__files": '[{"url": "https://host/a", "sha256": "1"}]'}, "'1' does not match pattern"),
        (
            {"replica__tensorParallelSize": 4, "replica__gpus": 8, "image__shard": '"gpu"'},
            "replica.tensorParallelSize 4 must be replica.gpus 8 times replica.nodes 1",
        ),
        (
            {"replica__tensorParallelSize": 3, "replica__nodes": 2},
            "replica.tensorParallelSize 3 must be a multiple of replica.nodes 2",
        ),
        ({"replica__tensorParallelSize": 128}, "replica.tensorParallelSize 128 is over 64 shards"),
        ({"apiKeys__enabled": "false"}, "enable apiKeys or tls.public.clientCertificates"),
        ({"replica__autoscaling__minReplicas": 5}, "replica.autoscaling.minReplicas 5 is over maxReplicas 4"),
        ({"model__name": "null"}, "at '/model': missing property 'name'"),
        ({"replica__shard": "null"}, "at '/replica': missing property 'shard'"),
        ({"model__subPath": '"a/../../b"'}, 'model.subPath "a/../../b" must be within'),
        ({"router__ingress__enabled": "true"}, "router.ingress.host is empty"),
        ({"router__podLabels": '{"app.kubernetes.io/name": "x"}'}, "'app.kubernetes.io/name'"),
        (
            {"replica__shard__resources": '{"limits": {"nvidia.com/gpu": 2}}'},
            "replica.shard.resources.limits has nvidia.com/gpu: replica.gpus requests them",
        ),
        ({"replica__gpus": 1}, "image.shard pagoda-shard-cpu computes on CPUs"),
        (
            {"router__autoscaling__enabled": "true", "router__resources__requests__cpu": "null"},
            "router.autoscaling needs router.resources.requests.cpu",
        ),
        ({"router__autoscaling__minReplicas": 9}, "router.autoscaling.minReplicas 9 is over maxReplicas 8"),
    ],
)
def test_a_wrong_value_is_named_with_its_limit(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RenderError) as refused:
        render(**settings)

    assert message in str(refused.value)


def test_limits_may_be_taken_away() -> None:
    router = container(objects(router__resources__limits="null"), "router")

    assert list(router["resources"]) == ["requests"]


def test_the_schema_is_one() -> None:
    jsonschema.Draft7Validator.check_schema(json.loads(generate.SCHEMA.read_text()))


def test_the_schema_has_every_option_of_the_processes() -> None:
    text = generate.SCHEMA.read_text()

    assert text == generate.schema(text, (CHART / "values.yaml").read_text()), (
        "run `python -m tests.helm.generate`"
    )


def test_every_value_is_explained() -> None:
    text = (CHART / "values.yaml").read_text()
    explained = {name for name, _, _ in generate.values(text)}

    def leaves(values: dict[str, object], prefix: str = "") -> set[str]:
        found = set()
        for name, value in values.items():
            path = prefix + name
            inner = isinstance(value, dict) and value and path not in explained
            found |= leaves(value, path + ".") if inner else {path}  # type: ignore[arg-type]
        return found

    assert leaves(yaml.safe_load(text)) == explained


def test_the_table_of_values_is_that_of_the_chart() -> None:
    text = generate.README.read_text()

    fresh = generate.readme(text, (CHART / "values.yaml").read_text())
    assert text == fresh, "run `python -m tests.helm.generate`"


def test_the_plain_manifests_are_those_of_the_chart() -> None:
    assert generate.MANIFESTS.read_text() == generate.manifests(), "run `python -m tests.helm.generate`"


def test_the_chart_has_the_dashboards_and_rules() -> None:
    assert generate.copied() == generate.copies(), "run `python -m tests.helm.generate`"
