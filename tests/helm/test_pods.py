"""What is rendered runs: each container's command, arguments, variables and probes, on this machine."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pagoda.v1.inference_pb2_grpc import InferenceServiceStub
from tests.e2e.client import Answer, spec
from tests.helm.release import Release, running

pytestmark = pytest.mark.e2e

# By name: values files and values.
RELEASES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "cpu": (("values-cpu.yaml",), {}),
    "two ranks": ((), {"replica__tensorParallelSize": 2}),
    "two nodes": ((), {"replica__tensorParallelSize": 2, "replica__nodes": 2}),
}
LONG = 300


@pytest.fixture(params=RELEASES)
def release(request: pytest.FixtureRequest, tiny_model_folder: Path, tmp_path: Path) -> Iterator[Release]:
    """Each way to run a replica, behind one router."""
    files, values = RELEASES[request.param]
    with running(files, values, tiny_model_folder, tmp_path) as release:
        yield release


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
    assert {status for pod in release.replica for status in pod.wait().values()} == {0}


def test_a_shard_that_is_killed_comes_back_and_nothing_is_lost(release: Release) -> None:
    with release.channel() as channel:
        answer = Answer(InferenceServiceStub(channel), spec(max_tokens=LONG, ignore_eos=True)).read(10)

        release.replica[-1].children("shard")[-1].kill()

        assert len(answer.finish().token_ids) == LONG


def test_a_router_that_is_ended_still_takes_what_comes_meanwhile(release: Release) -> None:
    with release.channel() as channel:
        stub = InferenceServiceStub(channel)
        answer = Answer(stub, spec(max_tokens=LONG, ignore_eos=True)).read(10)

        release.router.terminate()
        late = Answer(stub, spec(max_tokens=8, ignore_eos=True)).finish()

        assert len(late.token_ids) == 8
        assert len(answer.finish().token_ids) == LONG
    assert release.router.wait() == {"router": 0}
