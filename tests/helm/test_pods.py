"""What is rendered runs: each container's command, arguments, variables and probes, on this machine."""

import http.client
import json
import random
import ssl
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest

from pagoda.v1.inference_pb2_grpc import InferenceServiceStub
from router.auth import digest, new_key
from tests.authority import Authority
from tests.e2e.client import Answer, spec
from tests.helm.chart import objects, pod_templates
from tests.helm.pods import Pod

pytestmark = pytest.mark.e2e

KEY = new_key()
SCHEDULERS = "pagoda-scheduler.models.svc"
# By name: values files and values.
RELEASES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "cpu": (("values-cpu.yaml",), {}),
    "two ranks": ((), {"replica__tensorParallelSize": 2}),
    "two nodes": ((), {"replica__tensorParallelSize": 2, "replica__nodes": 2}),
}
LONG = 600


class Release(NamedTuple):
    """Running pods: one router, and those of one replica, its leader first."""

    router: Pod
    replica: list[Pod]
    ca: Path
    secure: bool

    def channel(self) -> grpc.Channel:
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
        if self.secure:
            context = ssl.create_default_context(cafile=str(self.ca))
            # The certificate names another address of this machine.
            context.check_hostname = False
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                self.router.ip, 8000, context=context, timeout=60
            )
        else:
            connection = http.client.HTTPConnection(self.router.ip, 8000, timeout=60)
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
        connection.request("POST", path, json.dumps(body), headers)
        response = connection.getresponse()
        assert response.status == 200, response.read()
        return json.loads(response.read())


def secrets(folder: Path, ca: Authority) -> dict[str, Path]:
    """The Secrets that the chart's values name, as kubelets mount them."""
    folders = {}
    for name, host in (
        ("pagoda-router-tls", "router"),
        ("pagoda-replica-tls", SCHEDULERS),
        ("pagoda-public-tls", "localhost"),
    ):
        pair = ca.issue(name, host)
        folders[name] = folder / "secrets" / name
        folders[name].mkdir(parents=True)
        (folders[name] / "tls.crt").write_bytes(pair.certificate.read_bytes())
        (folders[name] / "tls.key").write_bytes(pair.key.read_bytes())
        (folders[name] / "ca.crt").write_bytes(ca.file.read_bytes())
    folders["pagoda-api-keys"] = folder / "secrets" / "keys"
    folders["pagoda-api-keys"].mkdir()
    (folders["pagoda-api-keys"] / "keys.yaml").write_text(f'- id: "acme"\n  key_sha256: "{digest(KEY)}"\n')
    return folders


@pytest.fixture(params=RELEASES)
def release(request: pytest.FixtureRequest, tiny_model_folder: Path, tmp_path: Path) -> Iterator[Release]:
    files, values = RELEASES[request.param]
    rendered = objects(*files, router__drainDelaySeconds=1, **values)
    ca = Authority(tmp_path)
    folders = {"model": tiny_model_folder, **secrets(tmp_path, ca)}
    by_component: dict[str, list[Any]] = {"router": [], "replica": []}
    for template in pod_templates(rendered):
        by_component[template["metadata"]["labels"]["app.kubernetes.io/component"]].append(template)
    subnet = f"127.{random.randrange(1, 255)}.{random.randrange(255)}"
    leader, router = f"{subnet}.1", f"{subnet}.99"
    hosts = {
        f"pagoda-replica-0-{node}.pagoda-replica.models.svc": f"{subnet}.{node + 1}"
        for node in range(1, len(by_component["replica"]))
    }
    with ExitStack() as stack:
        replica = [
            stack.enter_context(
                Pod(
                    template,
                    f"{subnet}.{node + 1}",
                    hosts,
                    folders,
                    tmp_path / f"replica-{node}",
                    # As LeaderWorkerSet's controller gives them.
                    {"LWS_WORKER_INDEX": str(node), "LWS_LEADER_ADDRESS": leader},
                )
            )
            for node, template in enumerate(by_component["replica"])
        ]
        (template,) = by_component["router"]
        running = Release(
            stack.enter_context(Pod(template, router, {SCHEDULERS: leader}, folders, tmp_path / "router")),
            replica,
            ca.file,
            secure=request.param != "cpu",
        )
        for pod in (*replica, running.router):
            pod.wait_ready()
        yield running


def test_a_release_serves_both_apis(release: Release) -> None:
    with release.channel() as channel:
        answer = Answer(InferenceServiceStub(channel), spec(max_tokens=8, ignore_eos=True)).finish()
    body = release.post("/v1/completions", {"prompt": "Once", "max_tokens": 4})

    assert len(answer.token_ids) == 8
    assert body["choices"]


def test_a_replica_that_is_ended_loses_nothing(release: Release) -> None:
    with release.channel() as channel:
        answer = Answer(InferenceServiceStub(channel), spec(max_tokens=LONG, ignore_eos=True)).read(10)

        for pod in release.replica:
            pod.terminate()

        assert len(answer.finish().token_ids) == LONG
    assert [pod.wait() for pod in release.replica] == [
        dict.fromkeys(pod.wait(), 0) for pod in release.replica
    ]


def test_a_router_that_is_ended_still_takes_what_comes_meanwhile(release: Release) -> None:
    with release.channel() as channel:
        stub = InferenceServiceStub(channel)
        running = Answer(stub, spec(max_tokens=LONG, ignore_eos=True)).read(10)

        release.router.terminate()
        late = Answer(stub, spec(max_tokens=8, ignore_eos=True)).finish()

        assert len(late.token_ids) == 8
        assert len(running.finish().token_ids) == LONG
    assert release.router.wait() == {"router": 0}
