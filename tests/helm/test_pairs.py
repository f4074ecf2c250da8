"""Any two ways to change what is rendered go together."""

import itertools
import json
from typing import Any

import pytest

from tests.helm.chart import objects
from tests.helm.checks import VERSIONS, check_flags, check_mounts, check_objects

# Values that change what is rendered, each another way.
OPTIONS: dict[str, dict[str, Any]] = {
    "no TLS between pods": {"tls__internal__enabled": "false"},
    "cert-manager": {"tls__internal__certManager": "true"},
    "no TLS for clients": {"tls__public__enabled": "false"},
    "client certificates": {"tls__public__clientCertificates": "true"},
    "no keys": {"apiKeys__enabled": "false", "tls__public__clientCertificates": "true"},
    "download": {
        "model__source": '"download"',
        "model__files": json.dumps([{"url": "https://host/config.json", "sha256": "0" * 64}]),
        "model__env": '[{"name": "https_proxy", "value": "http://proxy:3128"}]',
    },
    "host path": {"model__source": '"hostPath"', "model__hostPath": '"/models"', "model__subPath": '"llama"'},
    "routers by CPU": {"router__autoscaling__enabled": "true"},
    "replicas by HPA": {"replica__autoscaling__kind": '"hpa"'},
    "replicas by KEDA": {"replica__autoscaling__kind": '"keda"'},
    "two ranks": {"replica__tensorParallelSize": 2},
    "two nodes": {"replica__nodes": 2, "replica__tensorParallelSize": 4},
    "monitoring": {
        "monitoring": '{"podMonitors": true, "rules": true, "dashboards": true}',
    },
    "no network policy": {"networkPolicy__enabled": "false"},
    "placement": {
        "replica__tolerations": '[{"operator": "Exists"}]',
        "replica__nodeSelector": '{"gpu": "yes"}',
        "replica__affinity": '{"nodeAffinity": {}}',
        "replica__runtimeClassName": '"nvidia"',
        "replica__podAnnotations": '{"a": "b"}',
        "router__nodeSelector": '{"pool": "small"}',
        "replica__priorityClassName": '"high"',
        "replica__topologySpreadConstraints": (
            '[{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}]'
        ),
        "router__topologySpreadConstraints": "[]",
    },
    "further volumes": {
        **{
            f"{pods}__volumes": '[{"name": "more", "configMap": {"name": "more"}}]'
            for pods in ("router", "replica")
        },
        **{
            f"{one}__{name}": value
            for one in ("router", "replica__scheduler", "replica__shard")
            for name, value in (
                ("volumeMounts", '[{"name": "more", "mountPath": "/more"}]'),
                ("envFrom", '[{"secretRef": {"name": "more"}}]'),
            )
        },
    },
    "pod labels": {
        "router": '{"podLabels": {"team": "a"}, "podAnnotations": {"a": "b"}}',
        "replica__podLabels": '{"team": "a"}',
    },
    "ingress": {
        "router__ingress": (
            '{"enabled": true, "host": "llm.example", "className": "nginx", "tlsSecret": "llm",'
            ' "annotations": {"a": "b"}}'
        ),
    },
    "gateway": {
        "router__gateway": (
            '{"parentRefs": [{"name": "public"}], "httpHostnames": ["llm.example"],'
            ' "grpcHostnames": ["grpc.example"]}'
        ),
    },
    "options": {
        "router__options": '{"log-requests": "summary", "trace-sample-ratio": 0.5}',
        "replica__scheduler__options": '{"max-num-seqs": 64, "enable-prefix-caching": false}',
        "replica__shard__options": '{"kv-cache-memory-bytes": 68719476736, "enforce-eager": true}',
    },
    "surroundings": {
        "image": '{"prefix": "registry.example/ai/", "tag": "1", "pullSecrets": [{"name": "pull"}]}',
        "router__service__annotations": '{"a": "b"}',
        "router__env": '[{"name": "A", "value": "b"}]',
        "replica__scheduler__env": '[{"name": "A", "value": "b"}]',
        "replica__shard__env": '[{"name": "NCCL_DEBUG", "value": "INFO"}]',
        "serviceAccount": '{"annotations": {"a": "b"}}',
    },
}
PAIRS = list(itertools.combinations(OPTIONS, 2))


@pytest.mark.parametrize("pair", PAIRS, ids=" + ".join)
def test_values_go_together(pair: tuple[str, str]) -> None:
    first, second = pair

    rendered = objects(**(OPTIONS[first] | OPTIONS[second]))

    check_objects(rendered, VERSIONS[-1])
    check_flags(rendered)
    check_mounts(rendered)
