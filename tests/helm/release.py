"""A release of the chart on this machine: its pods, with certificates, keys and a model."""

import http.client
import json
import random
import ssl
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from router.auth import digest, new_key
from tests.authority import Authority
from tests.helm.chart import objects, pod_templates
from tests.helm.pods import Pod, Tree

KEY = new_key()
SCHEDULERS = "pagoda-scheduler.models.svc"


@dataclass(frozen=True)
class Release:
    """Running pods: one router, and those of one replica, its leader first."""

    router: Pod
    replica: list[Pod]
    ca: Path
    secure: bool

    def channel(self) -> grpc.Channel:
        """To the gRPC API."""
        address = f"{self.router.ip}:50051"
        if not self.secure:
            return grpc.insecure_channel(address)
        credentials = grpc.composite_channel_credentials(
            grpc.ssl_channel_credentials(self.ca.read_bytes()), grpc.access_token_call_credentials(KEY)
        )
        return grpc.secure_channel(
            address, credentials, options=[("grpc.ssl_target_name_override", "localhost")]
        )

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The answer of the HTTP API."""
        connection = http.client.HTTPConnection(self.router.ip, 8000, timeout=60)
        if self.secure:
            context = ssl.create_default_context(cafile=str(self.ca))
            # The certificate names another address of this machine.
            context.check_hostname = False
            connection = http.client.HTTPSConnection(self.router.ip, 8000, context=context, timeout=60)
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
        connection.request("POST", path, json.dumps(body), headers)
        response = connection.getresponse()
        content = response.read()
        assert response.status == 200, content
        return json.loads(content)


@contextmanager
def running(
    files: tuple[str, ...],
    values: dict[str, Any],
    model: Path,
    scratch: Path,
    trees: Mapping[str, Tree] | None = None,
) -> Iterator[Release]:
    """What `files` and `values` render, once all is ready; processes run in `trees`, by container."""
    rendered = objects(*files, router__drainDelaySeconds=1, **values)
    templates: dict[str, list[Any]] = {"router": [], "replica": []}
    for template in pod_templates(rendered):
        templates[template["metadata"]["labels"]["app.kubernetes.io/component"]].append(template)
    ca = Authority(scratch)
    folders = {"model": model, **_secrets(scratch / "secrets", ca)}
    subnet = f"127.{random.randrange(1, 255)}.{random.randrange(255)}"
    ips = [f"{subnet}.{node}" for node in range(1, len(templates["replica"]) + 1)]
    workers = {
        f"pagoda-replica-0-{node}.pagoda-replica.models.svc": ip for node, ip in enumerate(ips) if node
    }
    with ExitStack() as stack:
        replica = []
        for node, (template, ip) in enumerate(zip(templates["replica"], ips, strict=True)):
            # As the controller of a LeaderWorkerSet gives it.
            environ = {"LWS_WORKER_INDEX": str(node)}
            pod = Pod(template, ip, workers, folders, scratch / f"replica-{node}", environ, trees)
            replica.append(stack.enter_context(pod))
        (template,) = templates["router"]
        hosts = {SCHEDULERS: ips[0]}
        router = Pod(template, f"{subnet}.99", hosts, folders, scratch / "router", trees=trees)
        stack.enter_context(router)
        for pod in (*replica, router):
            pod.wait_ready()
        yield Release(router, replica, ca.file, secure="values-cpu.yaml" not in files)


def _secrets(folder: Path, ca: Authority) -> dict[str, Path]:
    """The Secrets that the chart's values name, as kubelets mount them."""
    folders = {}
    hosts = {
        "pagoda-router-tls": "router",
        "pagoda-replica-tls": SCHEDULERS,
        "pagoda-public-tls": "localhost",
    }
    for name, host in hosts.items():
        pair = ca.issue(name, host)
        folders[name] = folder / name
        folders[name].mkdir(parents=True)
        for file, source in (("tls.crt", pair.certificate), ("tls.key", pair.key), ("ca.crt", ca.file)):
            (folders[name] / file).write_bytes(source.read_bytes())
    folders["pagoda-api-keys"] = folder / "keys"
    folders["pagoda-api-keys"].mkdir()
    (folders["pagoda-api-keys"] / "keys.yaml").write_text(f'- id: "acme"\n  key_sha256: "{digest(KEY)}"\n')
    return folders
