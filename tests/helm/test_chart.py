"""What the chart renders is what Kubernetes takes, and what the processes take."""

import json
import re
from typing import Any

import pytest
import yaml

from tests.helm.chart import (
    CHART,
    INSTALLATIONS,
    Object,
    container,
    containers,
    flags,
    helm,
    objects,
    of_kind,
    pod_templates,
)
from tests.helm.checks import CUSTOM, VERSIONS, check_flags, check_mounts, check_objects
from tests.helm.tools import ROOT
from tests.k8s.promql import rules, unknown_metrics


@pytest.fixture(params=INSTALLATIONS)
def rendered(request: pytest.FixtureRequest) -> list[Object]:
    """The objects of each installation."""
    return objects(*INSTALLATIONS[request.param])


@pytest.mark.parametrize("name", INSTALLATIONS)
def test_helm_finds_nothing_to_say(name: str) -> None:
    values = [word for file in INSTALLATIONS[name] for word in ("--values", str(CHART / file))]

    assert "0 chart(s) failed" in helm("lint", "--strict", str(CHART), *values)


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_takes_every_object(rendered: list[Object], version: str) -> None:
    check_objects(rendered, version)


def test_every_flag_is_one_that_its_process_has(rendered: list[Object]) -> None:
    check_flags(rendered)


def test_files_in_flags_are_mounted(rendered: list[Object]) -> None:
    check_mounts(rendered)


def test_secrets_have_the_files_that_flags_name(rendered: list[Object]) -> None:
    for spec, one in containers(rendered):
        secrets = {
            volume["name"]: volume["secret"]["secretName"] for volume in spec["volumes"] if "secret" in volume
        }
        for mount in one["volumeMounts"]:
            if mount["name"] not in secrets:
                continue
            names = {
                value.removeprefix(mount["mountPath"] + "/")
                for value in flags(one).values()
                if value.startswith(mount["mountPath"])
            }
            wanted = {"keys.yaml"} if mount["name"] == "keys" else {"tls.crt", "tls.key", "ca.crt"}
            assert names <= wanted
            assert names


def test_selectors_pick_the_pods_that_they_are_for(rendered: list[Object]) -> None:
    pods = [template["metadata"]["labels"] for template in pod_templates(rendered)]
    by_component = {labels["app.kubernetes.io/component"]: labels for labels in pods}

    for one in rendered:
        component = one["metadata"]["labels"]["app.kubernetes.io/component"]
        spec = one.get("spec", {})
        selector = spec.get("selector", spec.get("podSelector"))
        if selector is None:
            continue
        wanted = dict(selector.get("matchLabels", selector))
        # The controller labels pods with it.
        wanted.pop("leaderworkerset.sigs.k8s.io/worker-index", None)
        assert wanted.items() <= by_component[component].items()
        assert not any(
            wanted.items() <= labels.items() for name, labels in by_component.items() if name != component
        )


def port_numbers(one: Object) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in one["ports"]}


def test_ports_are_those_that_processes_listen_on(rendered: list[Object]) -> None:
    for _, one in containers(rendered):
        given = flags(one)
        listened = {
            int(value.rpartition(":")[2])
            for name, value in given.items()
            if name in ("--listen-address", "--http-address", "--metrics-address")
            if value.startswith("0.0.0.0:")
        }
        ranks = int(given.get("--tensor-parallel-size", 0)) // int(given.get("--nnodes", 1))
        for rank in range(ranks):
            listened.add(9104 + rank)
            if given["--listen-address"].startswith("0.0.0.0:"):
                listened.add(50053 + rank)

        assert set(port_numbers(one).values()) == listened


def test_services_reach_ports_that_there_are(rendered: list[Object]) -> None:
    named = {
        (template["metadata"]["labels"]["app.kubernetes.io/component"], name)
        for template in pod_templates(rendered)
        for one in template["spec"]["containers"]
        for name in port_numbers(one)
    }
    for service in of_kind(rendered, "Service"):
        component = service["spec"]["selector"]["app.kubernetes.io/component"]
        for port in service["spec"]["ports"]:
            assert (component, port["targetPort"]) in named


def test_no_two_containers_of_a_pod_share_a_port(rendered: list[Object]) -> None:
    for template in pod_templates(rendered):
        numbers = [number for one in template["spec"]["containers"] for number in port_numbers(one).values()]
        assert len(numbers) == len(set(numbers))


def test_probes_ask_the_metrics_port(rendered: list[Object]) -> None:
    paths = {"startupProbe": "/startupz", "livenessProbe": "/livez", "readinessProbe": "/readyz"}
    for _, one in containers(rendered):
        asked = flags(one)["--metrics-address"].rpartition(":")[2]
        for probe, path in paths.items():
            assert one[probe]["httpGet"]["path"] == path
            assert port_numbers(one)[one[probe]["httpGet"]["port"]] == int(asked)


def test_the_start_may_take_as_long_as_loading(rendered: list[Object]) -> None:
    probe = container(rendered, "shard")["startupProbe"]

    assert probe["periodSeconds"] * probe["failureThreshold"] == 900


def test_pods_stay_for_as_long_as_their_processes(rendered: list[Object]) -> None:
    for spec, one in containers(rendered):
        given = flags(one)
        needed = int(given["--shutdown-grace"]) + int(given.get("--drain-delay", 0))
        assert spec["terminationGracePeriodSeconds"] >= needed + 10


def test_shards_outstay_their_scheduler(rendered: list[Object]) -> None:
    graces = [int(flags(container(rendered, name))["--shutdown-grace"]) for name in ("shard", "scheduler")]

    assert graces[0] > graces[1]


def test_routers_find_the_service_of_the_schedulers(rendered: list[Object]) -> None:
    address = flags(container(rendered, "router"))["--scheduler-addresses"]
    service = next(one for one in of_kind(rendered, "Service") if one["spec"].get("clusterIP") == "None")

    name, namespace = service["metadata"]["name"], service["metadata"]["namespace"]
    assert address == f"dns:{name}.{namespace}.svc:{service['spec']['ports'][0]['port']}"


def test_every_gpu_has_one_shard() -> None:
    for name in ("gpu", "multinode"):
        shard = container(objects(*INSTALLATIONS[name]), "shard")
        given = flags(shard)

        gpus = shard["resources"]["limits"]["nvidia.com/gpu"] * int(given.get("--nnodes", 1))
        assert int(given["--tensor-parallel-size"]) == gpus


def test_a_scheduler_knows_the_shards_of_all_its_nodes() -> None:
    scheduler = container(
        objects(image__shard='"gpu"', replica__nodes=2, replica__tensorParallelSize=4, replica__gpus=2),
        "scheduler",
    )

    other = "$(POD_NAME)-1.pagoda-replica.models.svc"
    assert flags(scheduler)["--shard-addresses"].split(",") == [
        "127.0.0.1:50053",
        "127.0.0.1:50054",
        f"{other}:50053",
        f"{other}:50054",
    ]


def test_shards_of_one_pod_listen_on_loopback_and_those_of_several_with_mutual_tls() -> None:
    alone = flags(container(objects(), "shard"))
    across = flags(container(objects(replica__nodes=2, replica__tensorParallelSize=2), "shard"))

    assert alone["--listen-address"] == "127.0.0.1:50053"
    assert across["--listen-address"] == "0.0.0.0:50053"
    assert {"--tls-cert-file", "--tls-key-file", "--tls-client-ca-file"} <= across.keys()


def test_nothing_is_insecure_by_default() -> None:
    assert not [one["name"] for _, one in containers(objects()) if "--insecure" in flags(one)]


def test_containers_may_do_nothing_that_they_need_not(rendered: list[Object]) -> None:
    for spec, one in containers(rendered):
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not spec["automountServiceAccountToken"]
        assert not spec["enableServiceLinks"]
        assert one["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


def test_shards_have_shared_memory_and_a_writable_cache(rendered: list[Object]) -> None:
    for spec, one in containers(rendered):
        if one["name"] != "shard":
            continue
        volumes = {volume["name"]: volume.get("emptyDir") for volume in spec["volumes"]}
        mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in one["volumeMounts"]}
        assert mounts["/dev/shm"]["medium"] == "Memory"  # noqa: S108
        assert mounts["/cache"] is not None


def test_routers_download_no_weights() -> None:
    files = [
        {"url": f"https://host/{name}", "sha256": "0" * 64} for name in ("config.json", "model-1.safetensors")
    ]

    rendered = objects(model__source='"download"', model__files=json.dumps(files))

    fetched = {
        template["metadata"]["labels"]["app.kubernetes.io/component"]: [
            word.rpartition("/")[2] for word in template["spec"]["initContainers"][0]["args"][1:]
        ]
        for template in pod_templates(rendered)
    }
    assert fetched == {"router": ["config.json"], "replica": ["config.json", "model-1.safetensors"]}


def test_whole_numbers_stay_whole() -> None:
    shard = container(
        objects(replica__shard__options='{"kv-cache-memory-bytes": 68719476736, "enforce-eager": true}'),
        "shard",
    )

    assert flags(shard)["--kv-cache-memory-bytes"] == "68719476736"
    assert "--enforce-eager" in flags(shard)


def test_autoscaled_replicas_have_no_fixed_number() -> None:
    rendered = objects(replica__autoscaling__kind='"hpa"')

    (hpa,) = of_kind(rendered, "HorizontalPodAutoscaler")
    (target,) = of_kind(rendered, hpa["spec"]["scaleTargetRef"]["kind"])
    assert target["metadata"]["name"] == hpa["spec"]["scaleTargetRef"]["name"]
    assert "replicas" not in target["spec"]


def test_keda_asks_for_metrics_that_there_are() -> None:
    (scaled,) = of_kind(objects(replica__autoscaling__kind='"keda"'), "ScaledObject")

    queries = [trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"]]
    assert len(queries) == 2
    assert not [name for query in queries for name in unknown_metrics(query)]


def test_certificates_name_what_clients_check() -> None:
    rendered = objects(tls__internal__certManager="true")

    made = {one["spec"]["secretName"]: one["spec"] for one in of_kind(rendered, "Certificate")}
    host = flags(container(rendered, "router"))["--scheduler-addresses"].split(":")[1]
    assert made["pagoda-replica-tls"]["dnsNames"] == [host]
    issuers = {one["metadata"]["name"] for one in of_kind(rendered, "Issuer")}
    assert {one["issuerRef"]["name"] for one in made.values()} <= issuers


def test_monitors_ask_every_process_of_a_pod() -> None:
    rendered = objects(monitoring__podMonitors="true", replica__tensorParallelSize=2)

    monitored = {}
    for monitor in of_kind(rendered, "PodMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        (pod,) = [one for one in pod_templates(rendered) if wanted <= one["metadata"]["labels"].items()]
        named = {name: port for one in pod["spec"]["containers"] for name, port in port_numbers(one).items()}
        endpoints = monitor["spec"]["podMetricsEndpoints"]
        monitored[monitor["metadata"]["name"]] = [named[endpoint["port"]] for endpoint in endpoints]
    assert monitored == {
        "pagoda-router": [9101],
        "pagoda-scheduler": [9102],
        "pagoda-shard": [9104, 9105],
    }


def test_rules_and_dashboards_are_those_of_the_repository() -> None:
    rendered = objects(monitoring__rules="true", monitoring__dashboards="true")

    specs = [one["spec"] for one in of_kind(rendered, "PrometheusRule")]
    assert specs == [yaml.safe_load(path.read_text()) for path in (ROOT / "k8s" / "rules").glob("*.yaml")]
    dashboards = [one["data"] for one in of_kind(rendered, "ConfigMap")]
    files = sorted((ROOT / "k8s" / "dashboards").glob("*.json"))
    assert [list(data) for data in dashboards] == [[path.name] for path in files]
    assert [json.loads(data[path.name]) for data, path in zip(dashboards, files, strict=True)] == [
        json.loads(path.read_text()) for path in files
    ]


@pytest.mark.parametrize("settings", [{}, {"fullnameOverride": '"llm"'}], ids=["by default", "renamed"])
def test_the_alert_of_processes_finds_the_jobs_of_monitors(settings: dict[str, str]) -> None:
    (alert,) = (rule for rule in rules() if rule.get("alert") == "PagodaProcessDown")
    (wanted,) = re.findall(r'job=~"([^"]+)"', alert["expr"])

    monitors = of_kind(objects(monitoring__podMonitors="true", **settings), "PodMonitor")

    jobs = [
        relabeling["replacement"]
        for monitor in monitors
        for endpoint in monitor["spec"]["podMetricsEndpoints"]
        for relabeling in endpoint["relabelings"]
        if relabeling["targetLabel"] == "job"
    ]
    assert len(set(jobs)) == 3
    assert all(re.fullmatch(wanted, job) for job in jobs)


def test_a_prometheus_picks_monitors_and_rules_by_their_labels() -> None:
    rendered = objects(
        monitoring='{"podMonitors": true, "rules": true, "labels": {"release": "kube-prometheus-stack"}}'
    )

    made = of_kind(rendered, "PodMonitor") + of_kind(rendered, "PrometheusRule")
    assert len(made) == 4
    assert {one["metadata"]["labels"]["release"] for one in made} == {"kube-prometheus-stack"}


def test_releases_of_one_namespace_share_no_object() -> None:
    def made(release: str) -> set[tuple[str, str]]:
        values = ("--set", "tls.internal.certManager=true", "--set", "monitoring.podMonitors=true")
        text = helm("template", release, str(CHART), *values)
        objects = [one for one in yaml.safe_load_all(text) if one]
        secrets = {("Secret", one["spec"]["secretName"]) for one in of_kind(objects, "Certificate")}
        return secrets | {(one["kind"], one["metadata"]["name"]) for one in objects}

    first, second = made("pagoda"), made("other")

    assert ("Secret", "pagoda-replica-tls") in first
    assert not first & second


@pytest.mark.parametrize(
    ("settings", "secrets"),
    [
        ([], ["pagoda-router-tls", "pagoda-replica-tls", "pagoda-public-tls", "pagoda-api-keys"]),
        (["tls.internal.certManager=true"], ["pagoda-public-tls", "pagoda-api-keys"]),
    ],
    ids=["by hand", "with cert-manager"],
)
def test_the_notes_name_each_secret_that_is_missing(settings: list[str], secrets: list[str]) -> None:
    values = [word for setting in settings for word in ("--set", setting)]

    notes = helm("install", "pagoda", str(CHART), "--dry-run=client", *values).partition("NOTES:")[2]

    assert re.findall(r"pagoda-[\w-]+-(?:tls|keys)", notes.partition("Secrets")[2]) == secrets


def test_a_digest_gets_no_tag() -> None:
    image = "pagoda-router@sha256:" + "0" * 64

    assert container(objects(image__router=f'"{image}"'), "router")["image"] == image


@pytest.mark.parametrize(
    ("settings", "device"),
    [
        ({"replica__gpus": 1, "image__shard": '"gpu"'}, "cuda"),
        ({"replica__shard__options": '{"device": "cpu"}'}, "cpu"),
        ({}, None),
    ],
)
def test_who_requests_gpus_never_computes_on_cpus(settings: dict[str, Any], device: str | None) -> None:
    assert flags(container(objects(**settings), "shard")).get("--device") == device


def test_metrics_are_closed_where_nobody_monitors() -> None:
    policies = of_kind(objects(networkPolicy__monitoring="[]"), "NetworkPolicy")

    ports = [port["port"] for one in policies for rule in one["spec"]["ingress"] for port in rule["ports"]]
    assert sorted(map(str, ports)) == ["50052", "grpc", "http"]


def test_downloads_reach_the_ports_of_their_urls() -> None:
    urls = ("https://host/a", "https://host/b", "http://host/c", "https://host:8443/d")
    files = [{"url": url, "sha256": "0" * 64} for url in urls]

    policies = of_kind(objects(model__source='"download"', model__files=json.dumps(files)), "NetworkPolicy")

    for one in policies:
        assert [port["port"] for port in one["spec"]["egress"][-1]["ports"]] == [443, 80, 8443]


def test_pods_are_spread_by_their_own_labels() -> None:
    constraint = '[{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}]'

    rendered = objects(replica__topologySpreadConstraints=constraint)

    for template in pod_templates(rendered):
        (spread,) = template["spec"]["topologySpreadConstraints"]
        assert spread["labelSelector"]["matchLabels"] == template["metadata"]["labels"]


@pytest.mark.parametrize(
    ("kind", "port"), [("HTTPRoute", "http"), ("GRPCRoute", "grpc"), ("Ingress", "http")]
)
def test_what_leads_to_routers_names_a_port_of_their_service(kind: str, port: str) -> None:
    rendered = objects(
        router__ingress='{"enabled": true, "host": "llm.example"}',
        router__gateway='{"parentRefs": [{"name": "public"}]}',
    )

    (one,) = of_kind(rendered, kind)
    (service,) = [each for each in of_kind(rendered, "Service") if each["spec"].get("clusterIP") != "None"]
    numbers = {each["name"]: each["port"] for each in service["spec"]["ports"]}
    (rule,) = one["spec"]["rules"]
    if kind == "Ingress":
        backend = rule["http"]["paths"][0]["backend"]["service"]
        assert backend == {"name": service["metadata"]["name"], "port": {"name": port}}
    else:
        assert rule["backendRefs"] == [{"name": service["metadata"]["name"], "port": numbers[port]}]


def test_names_have_pagoda_in_them() -> None:
    rendered = helm("template", "llm", str(CHART), "--show-only", "templates/service-account.yaml")

    assert yaml.safe_load(rendered)["metadata"]["name"] == "llm-pagoda"


def test_only_known_apis_are_used(rendered: list[Object]) -> None:
    for one in rendered:
        group = one["apiVersion"].rpartition("/")[0]
        assert group in {"", "apps", "policy", "autoscaling", "networking.k8s.io", *CUSTOM}
