import asyncio
from pathlib import Path

import pytest

from common.tls import client_tls, server_tls
from common.version import PROTOCOL_VERSION
from pagoda.scheduler.v1 import scheduler_pb2 as pb
from router import metrics
from router.discovery import Discovery
from router.errors import RequestError
from router.replicas import Replicas
from router.scheduler_link import Connection
from tests.authority import Authority
from tests.router.fake_scheduler import FakeScheduler


class Recorder:
    """A sink that writes down its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def on_accepted(self) -> None:
        self.calls.append("accepted")

    def on_refused(self, refused: pb.RequestRefused) -> None:
        self.calls.append("refused")

    def on_token(self, output_index: int, token_id: int) -> None:
        self.calls.append(f"token {token_id} of {output_index}")

    def on_output(self, output: pb.SequenceOutput) -> None:
        self.calls.append(f"output {list(output.token_ids)}")

    def on_lost(self) -> None:
        self.calls.append("lost")


def key(name: str = "a", attempt: int = 0) -> pb.RequestKey:
    return pb.RequestKey(request_id=name, attempt=attempt)


def outputs(*sequences: pb.SequenceOutput, load: pb.Load | None = None) -> pb.ServeResponse:
    return pb.ServeResponse(outputs=pb.StepOutputs(sequences=sequences, load=load))


@pytest.fixture
async def connection() -> Connection:
    return Connection(pb.Hello(protocol_version=PROTOCOL_VERSION))


def test_messages_reach_the_attempt_that_they_are_for(connection: Connection) -> None:
    first, second = Recorder(), Recorder()
    connection.submit(pb.Submit(key=key("a", 0)), first)
    connection.submit(pb.Submit(key=key("a", 1)), second)
    connection.dispatch(pb.ServeResponse(accepted=pb.RequestAccepted(key=key("a", 1))))
    connection.dispatch(outputs(pb.SequenceOutput(key=key("a", 0), token_ids=[7])))
    connection.dispatch(pb.ServeResponse(refused=pb.RequestRefused(key=key("a", 0))))
    connection.dispatch(outputs(pb.SequenceOutput(key=key("a", 0), token_ids=[8])))
    connection.lose()
    assert (first.calls, second.calls) == (["output [7]", "refused"], ["accepted", "lost"])


async def test_a_submit_that_was_not_sent_is_withdrawn_by_its_abort(connection: Connection) -> None:
    outgoing = connection.outgoing()
    assert (await anext(outgoing)).WhichOneof("message") == "hello"
    for attempt in range(100):
        connection.submit(pb.Submit(key=key("a", attempt)), Recorder())
        connection.abort(("a", attempt))
    connection.submit(pb.Submit(key=key("last")), Recorder())
    assert (await anext(outgoing)).submit.key == key("last")


async def test_a_submit_that_was_sent_is_aborted_on_the_wire(connection: Connection) -> None:
    outgoing = connection.outgoing()
    await anext(outgoing)
    connection.submit(pb.Submit(key=key()), Recorder())
    await anext(outgoing)
    connection.abort(("a", 0), output_index=1)
    connection.abort(("a", 0))
    aborts = [(await anext(outgoing)).abort for _ in range(2)]
    assert aborts == [pb.Abort(key=key(), output_index=1), pb.Abort(key=key())]


async def test_a_lost_stream_has_nothing_more_to_send(connection: Connection) -> None:
    outgoing = connection.outgoing()
    await anext(outgoing)
    rest = asyncio.ensure_future(anext(outgoing, None))
    await asyncio.sleep(0)
    connection.lose()
    assert await rest is None


def test_outstanding_tokens_are_those_reported_and_those_submitted_since(connection: Connection) -> None:
    connection.submit(pb.Submit(key=key(), prompt_token_ids=[1, 2, 3], max_tokens=10), Recorder())
    assert connection.outstanding_tokens == 13
    connection.dispatch(outputs(load=pb.Load(outstanding_tokens=5)))
    assert connection.outstanding_tokens == 5


async def connect(replicas: Replicas) -> None:
    while not replicas.connected:
        await replicas.wait_change()


@pytest.mark.parametrize("version", [PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1])
async def test_versions_one_apart_are_fine(fake: FakeScheduler, version: int) -> None:
    fake.welcome.protocol_version = version
    replicas = Replicas(Discovery([fake.address]))
    replicas.start()
    await connect(replicas)
    assert replicas.welcome == fake.welcome
    assert (await fake.hellos.get()).protocol_version == PROTOCOL_VERSION
    await replicas.close()


async def test_versions_further_apart_are_named(
    fake: FakeScheduler, caplog: pytest.LogCaptureFixture
) -> None:
    fake.welcome.protocol_version = PROTOCOL_VERSION + 2
    replicas = Replicas(Discovery([fake.address]))
    replicas.start()
    for _ in range(2):
        await fake.hellos.get()
    assert not replicas.connected
    with pytest.raises(RequestError, match="no scheduler has connected"):
        _ = replicas.welcome
    lines = [record.message for record in caplog.records if "protocol version 3" in record.message]
    assert len(lines) == 1
    await replicas.close()


async def test_connects_again_to_a_scheduler_that_comes_back(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    address = f"unix:{tmp_path_factory.mktemp('s')}/x.sock"
    replicas = Replicas(Discovery([address]))
    replicas.start()
    up = metrics.SCHEDULER_UP.labels(address)._value
    assert up.get() == 0
    for _ in range(2):
        fake = FakeScheduler()
        await fake.start(address)
        await connect(replicas)
        assert up.get() == 1
        await fake.stop()
        while replicas.connected:
            await replicas.wait_change()
        assert up.get() == 0
    await replicas.close()


def test_plain_tokens_come_by_number_until_the_request_is_over(connection: Connection) -> None:
    def plain(number: int, index: int, token_id: int) -> pb.ServeResponse:
        outputs = pb.StepOutputs(handles=[number << 8 | index], token_ids=[token_id])
        return pb.ServeResponse(outputs=outputs)

    sink = Recorder()
    connection.submit(pb.Submit(key=key()), sink)
    connection.dispatch(pb.ServeResponse(accepted=pb.RequestAccepted(key=key(), number=5)))
    connection.dispatch(plain(5, 1, 42))
    connection.dispatch(plain(6, 0, 43))
    connection.forget(("a", 0))
    connection.dispatch(plain(5, 1, 44))

    assert sink.calls == ["accepted", "token 42 of 1"]


async def test_a_sink_that_fails_breaks_the_stream_and_not_the_link(fake: FakeScheduler) -> None:
    class Broken(Recorder):
        def on_accepted(self) -> None:
            raise ZeroDivisionError

    replicas = Replicas(Discovery([fake.address]))
    replicas.start()
    await connect(replicas)
    await fake.hellos.get()
    sink = Broken()
    replicas.connected[0].submit(pb.Submit(key=key()), sink)
    await fake.accept()
    await fake.hellos.get()
    assert sink.calls == ["lost"]
    await replicas.close()


async def test_a_certificate_that_is_renewed_opens_the_way(tmp_path: Path) -> None:
    ca = Authority(tmp_path)
    fake = FakeScheduler()
    await fake.start(tls=server_tls(*ca.issue("scheduler"), ca.file))
    stranger = Authority(tmp_path, "stranger").issue("router")
    replicas = Replicas(Discovery([fake.address]), tls=client_tls("scheduler-tls", ca.file, *stranger))
    attempts = metrics.RECONNECTS.labels(fake.address)._value
    replicas.start()
    while attempts.get() < 2:
        await replicas.wait_change()
    assert not replicas.connected

    ca.issue("router")
    await connect(replicas)

    await replicas.close()
    await fake.stop()


async def test_attempt_numbers_never_repeat() -> None:
    replicas = Replicas(Discovery(["127.0.0.1:1"]))
    assert len({replicas.next_attempt() for _ in range(50)}) == 50


async def test_close_wakes_those_who_wait() -> None:
    replicas = Replicas(Discovery(["127.0.0.1:1"]))
    replicas.start()
    waiter = asyncio.create_task(replicas.wait_change())
    await asyncio.sleep(0)
    await replicas.close()
    await waiter
    assert replicas.closed
