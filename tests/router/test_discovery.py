"""Schedulers that come and go in DNS: a resolver that a test plays, and real loopback addresses."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

import pytest

from pagoda.scheduler.v1 import scheduler_pb2 as pb
from router import metrics
from router.discovery import MAX_ADDRESSES, Discovery, Endpoint, resolve
from router.replicas import Replicas
from tests.router.fake_scheduler import FakeScheduler
from tests.router.test_scheduler_link import Recorder, key


class Dns:
    """Answers with `ips`, or fails; counts how often it was asked."""

    def __init__(self, *ips: str) -> None:
        self.ips: Sequence[str] | OSError = ips
        self.asked = 0

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked += 1
        if isinstance(self.ips, OSError):
            raise self.ips
        return self.ips


async def until(condition: Callable[[], bool]) -> None:
    """The loop has turned often enough."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


class Fleet:
    """Two schedulers on two addresses with one port, and replicas that find them by name."""

    def __init__(self) -> None:
        self.first, self.second = FakeScheduler(), FakeScheduler()
        self.dns = Dns("127.0.0.2", "127.0.0.3")
        self.replicas = Replicas(Discovery([]))

    async def start(self) -> None:
        await self.first.start("127.0.0.2:0")
        port = self.first.address.rpartition(":")[2]
        await self.second.start(f"127.0.0.3:{port}")
        discovery = Discovery([f"dns:replicas.test:{port}"], self.dns)
        self.replicas = Replicas(discovery, resolve_period_s=0.001)
        self.replicas.start()
        await until(lambda: len(self.replicas.available) == 2)

    def available(self) -> list[str]:
        return [connection.address for connection in self.replicas.available]

    async def resolved(self) -> None:
        """What DNS says now has been heard and followed."""
        before = self.dns.asked
        await until(lambda: self.dns.asked > before + 1)

    async def close(self) -> None:
        await self.replicas.close()
        await self.first.stop()
        await self.second.stop()


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    fleet = Fleet()
    await fleet.start()
    yield fleet
    await fleet.close()


async def test_every_address_of_a_name_has_one_link(fleet: Fleet) -> None:
    await fleet.resolved()

    assert sorted(fleet.available()) == [fleet.first.address, fleet.second.address]
    assert (fleet.first.hellos.qsize(), fleet.second.hellos.qsize()) == (1, 1)


async def test_an_address_that_vanished_gets_nothing_new_and_its_streams_go_on(fleet: Fleet) -> None:
    sink = Recorder()
    leaving = next(one for one in fleet.replicas.available if one.address == fleet.second.address)
    leaving.submit(pb.Submit(key=key()), sink)
    fleet.dns.ips = ["127.0.0.2"]
    await fleet.resolved()

    fleet.second.send(await fleet.second.accept(), [7])
    await until(lambda: len(sink.calls) == 2)

    assert sink.calls == ["accepted", "output [7]"]
    assert fleet.available() == [fleet.first.address]
    assert leaving in fleet.replicas.connected


async def test_who_waits_for_a_replica_hears_that_its_address_vanished(fleet: Fleet) -> None:
    busy = next(one for one in fleet.replicas.available if one.address == fleet.second.address)
    busy.submit(pb.Submit(key=key()), Recorder())
    waiting = asyncio.create_task(fleet.replicas.wait_change())

    fleet.dns.ips = ["127.0.0.2"]

    async with asyncio.timeout(20):
        await waiting
    assert fleet.available() == [fleet.first.address]


async def test_a_link_to_what_vanished_ends_with_its_last_request(fleet: Fleet) -> None:
    leaving = next(one for one in fleet.replicas.available if one.address == fleet.second.address)
    leaving.submit(pb.Submit(key=key()), Recorder())
    fleet.dns.ips = ["127.0.0.2"]
    await fleet.resolved()

    leaving.forget(("a", 0))
    await until(lambda: leaving not in fleet.replicas.connected)

    [metric] = metrics.SCHEDULER_UP.collect()
    labels = {sample.labels["scheduler"] for sample in metric.samples}
    assert fleet.second.address not in labels


async def test_a_resolver_that_fails_changes_nothing(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    fleet.dns.ips = OSError("no name server answers")
    await fleet.resolved()

    assert len(fleet.available()) == 2
    assert [record.message for record in caplog.records if "no name server" in record.message] == [
        f"--scheduler-addresses dns:replicas.test:{fleet.first.address[10:]}: no name server answers"
    ]


async def test_what_flaps_keeps_its_stream_while_it_runs_something(fleet: Fleet) -> None:
    flapping = next(one for one in fleet.replicas.available if one.address == fleet.second.address)
    flapping.submit(pb.Submit(key=key()), Recorder())

    for _ in range(20):
        fleet.dns.ips = ["127.0.0.2"]
        await fleet.resolved()
        fleet.dns.ips = ["127.0.0.2", "127.0.0.3"]
        await fleet.resolved()

    assert flapping in fleet.replicas.available
    assert fleet.second.hellos.qsize() == 1


async def test_metrics_count_what_is_known_and_what_is_up(fleet: Fleet) -> None:
    fleet.dns.ips = ["127.0.0.2", "127.0.0.3", "127.0.0.4"]
    await fleet.resolved()

    counts = [metrics.REPLICAS.labels(state)._value.get() for state in ("known", "up", "available")]
    assert counts == [3, 2, 2]


async def test_static_addresses_stay_beside_names_and_are_one_with_them() -> None:
    dns = Dns("127.0.0.1", "::1")
    discovery = Discovery(["127.0.0.1:7", "unix:/run/x", "dns:replicas.test:7"], dns)

    await discovery.refresh()

    assert discovery.endpoints == {
        "127.0.0.1:7": Endpoint("127.0.0.1:7"),
        "[::1]:7": Endpoint("[::1]:7", "replicas.test"),
        "unix:/run/x": Endpoint("unix:/run/x"),
    }


async def test_a_name_has_so_many_addresses_at_most() -> None:
    discovery = Discovery(["dns:many.test:7"], Dns(*(f"10.0.{i // 256}.{i % 256}" for i in range(1000))))

    await discovery.refresh()

    assert len(discovery.endpoints) == MAX_ADDRESSES


async def test_the_system_resolves_names() -> None:
    assert "127.0.0.1" in await resolve("localhost", 7)
