"""What must be so of whatever the chart renders."""

import kubernetes_validate

from common.config import load
from tests.docs.generate import CONFIGS
from tests.helm.chart import Object, containers, flags, pod_templates

# By API group: what Kubernetes itself has no schema for.
CUSTOM = (
    *("leaderworkerset.x-k8s.io", "keda.sh", "cert-manager.io", "monitoring.coreos.com"),
    "gateway.networking.k8s.io",
)
# The oldest that the chart is for, and the newest that there are schemas of.
VERSIONS = ("1.30", kubernetes_validate.latest_version())


def validate(one: Object, version: str) -> None:
    kubernetes_validate.validate(one, version, strict=True)


def check_objects(rendered: list[Object], version: str) -> None:
    """Checks all that Kubernetes has a schema for, the pods of a LeaderWorkerSet included."""
    for one in rendered:
        if not one["apiVersion"].startswith(CUSTOM):
            validate(one, version)
    for template in pod_templates(rendered):
        validate({"apiVersion": "v1", "kind": "PodTemplate", "template": template}, version)


def check_flags(rendered: list[Object]) -> None:
    """Reads arguments as the process does, and checks that none is given twice."""
    for _, one in containers(rendered):
        service = one["command"][-1]
        words = [word.replace("$(LWS_WORKER_INDEX)", "1") for word in one["args"]]
        border = words.index("--") if "--" in words else len(words)
        for name, given in ((service, words[:border]), ("shard", words[border + 1 :])):
            if given:
                load(CONFIGS[name], name, given, environ={})
            assert len({word.partition("=")[0] for word in given}) == len(given), given


def check_mounts(rendered: list[Object]) -> None:
    """Checks that files in flags lie in volumes that are mounted, and that every volume is."""
    for template in pod_templates(rendered):
        spec = template["spec"]
        mounted = set()
        for one in spec["containers"]:
            mounts = {mount["mountPath"]: mount["name"] for mount in one["volumeMounts"]}
            mounted |= set(mounts.values())
            paths = [value for value in flags(one).values() if value.startswith("/")]
            paths += [item["value"] for item in one.get("env", []) if item.get("value", "").startswith("/")]
            for path in paths:
                assert any(f"{path}/".startswith(f"{mount}/") for mount in mounts), path
        volumes = {volume["name"] for volume in spec["volumes"]}
        assert len(volumes) == len(spec["volumes"])
        assert volumes == mounted
