"""What a router counts beside its calls."""

import re

import grpc
import pytest

from pagoda.v1 import inference_pb2 as pb
from router import metrics
from tests.k8s.promql import rules
from tests.router.conftest import Client, StartRouter
from tests.router.fake_scheduler import LENGTH, FakeScheduler
from tests.router.test_service import error_of, generate, ids, pick, spec
from tests.samples import growth, sample


@pytest.fixture(autouse=True)
def no_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_tenants", set())


def test_tenants_beyond_the_limit_are_one() -> None:
    other = growth("pagoda_router_tenant_requests_total", tenant="other")
    for number in range(metrics.MAX_TENANTS + 5):
        metrics.count_tenant(f"key-{number}", pb.Usage())
    first = growth("pagoda_router_tenant_requests_total", tenant="key-0")

    metrics.count_tenant("key-0", pb.Usage())

    assert other() == 5
    assert first() == 1


async def test_a_request_counts_for_its_tenant_when_it_ends(client: Client) -> None:
    output = growth("pagoda_router_tenant_tokens_total", tenant="none", kind="output")
    prompt = growth("pagoda_router_tenant_tokens_total", tenant="none", kind="prompt")
    call = generate(client, spec())
    client.scheduler.send(await client.scheduler.accept(), ids("fox"), LENGTH)

    usage = (await call).usage

    assert (prompt(), output()) == (usage.prompt_tokens, usage.completion_tokens)


async def test_an_error_counts_by_its_reason(client: Client) -> None:
    errors = growth("pagoda_router_errors_total", reason="SCHEDULER_INVALID_ARGUMENT")
    call = generate(client, spec())
    await client.scheduler.refuse(grpc.StatusCode.INVALID_ARGUMENT, "never fits")

    await error_of(call)

    assert errors() == 1


async def test_a_full_replica_costs_a_retry_and_no_resubmit(start_router: StartRouter) -> None:
    client = await start_router([FakeScheduler(), FakeScheduler()])
    retries, resubmits = growth("pagoda_router_retries_total"), growth("pagoda_router_resubmits_total")
    call = generate(client, spec())
    here, there = await pick(client)
    await here.refuse(grpc.StatusCode.RESOURCE_EXHAUSTED, "queue is full")
    there.send(await there.accept(), ids("fox"), LENGTH)

    await call

    assert (retries(), resubmits()) == (1, 0)


async def test_the_router_says_which_model_it_serves(client: Client) -> None:
    name = client.router.inference.model_name

    assert sample("pagoda_model_info", name=name, revision="r1", dtype="float32") == 1


@pytest.mark.parametrize("fault", metrics.FAULTS)
@pytest.mark.parametrize("method", metrics.GENERATING)
def test_a_fault_is_there_before_it_happens(method: str, fault: str) -> None:
    assert sample("pagoda_router_requests_total", method=method, code=fault) >= 0


def test_the_alert_counts_those_that_are_there() -> None:
    (alert,) = (rule for rule in rules() if rule.get("alert") == "PagodaErrors")

    assert set(re.findall(r'code=~"([^"]+)"', alert["expr"])) == {"|".join(metrics.FAULTS)}
