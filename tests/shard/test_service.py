"""ShardService over real gRPC, on a tiny model."""

import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from common.rpc import SERVER_OPTIONS, bind
from common.version import PROTOCOL_VERSION
from pagoda.shard.v1.shard_pb2 import (
    ConfigureRequest,
    DescribeRequest,
    DescribeResponse,
    ExecuteRequest,
    Join,
    PrepareConstraintRequest,
    PrepareConstraintResponse,
    Scheduled,
)
from pagoda.shard.v1.shard_pb2_grpc import ShardServiceStub, add_ShardServiceServicer_to_server
from pagoda.v1.inference_pb2 import Choices, Constraint, PriorOutput
from pagoda.v1.sampling_pb2 import SamplingParams
from shard.constraints import Grammars
from shard.executor import StepExecutor
from shard.parallel import RankLostError
from shard.service import Loaded, ShardService
from tests.router.models import byte_level_bpe


@pytest.fixture
def service() -> ShardService:
    return ShardService()


@pytest.fixture
def stub(service: ShardService) -> Iterator[ShardServiceStub]:
    server = grpc.server(ThreadPoolExecutor(4), options=SERVER_OPTIONS)
    add_ShardServiceServicer_to_server(service, server)
    port = bind(server, "127.0.0.1:0")
    server.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield ShardServiceStub(channel)
    server.stop(0).wait()


@pytest.fixture
def loaded(service: ShardService, executor: StepExecutor) -> Loaded:
    description = DescribeResponse(
        protocol_version=PROTOCOL_VERSION, max_model_len=128, kv_bytes_per_token=10, kv_capacity_bytes=640
    )
    service.loaded = Loaded(executor, description, Grammars(Path("no tokenizer"), 256))
    return service.loaded


def configuration(**fields: int) -> ConfigureRequest:
    sizes: dict[str, Any] = {
        "protocol_version": PROTOCOL_VERSION,
        "epoch": 1,
        "num_blocks": 8,
        "block_size": 4,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 8,
        "max_model_len": 32,
    }
    return ConfigureRequest(**{**sizes, **fields})


def prefill(epoch: int = 1, step: int = 0) -> ExecuteRequest:
    params = SamplingParams(temperature=0, top_p=1, repetition_penalty=1)
    join = Join(slot=0, token_ids=[1, 2, 3], prompt_length=3, block_ids=[0, 1], sampling=params)
    return ExecuteRequest(epoch=epoch, step=step, joins=[join], scheduled=[Scheduled(slot=0, num_tokens=3)])


def decode(step: int) -> ExecuteRequest:
    return ExecuteRequest(epoch=1, step=step, scheduled=[Scheduled(slot=0, num_tokens=1)])


def execute(stub: ShardServiceStub, commands: Iterable[ExecuteRequest]) -> Any:
    """The call: an iterator of responses, for which the stubs have no type."""
    return stub.Execute(iter(commands))


def code_of(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code()


def test_describe_says_unavailable_and_how_far_while_loading(
    service: ShardService, stub: ShardServiceStub
) -> None:
    service.load_state = "loading 40 %"

    with pytest.raises(grpc.RpcError) as caught:
        stub.Describe(DescribeRequest())

    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert caught.value.details() == "loading 40 %"


def test_steps_come_back_in_order(stub: ShardServiceStub, loaded: Loaded) -> None:
    assert stub.Configure(configuration()).epoch == 1
    assert stub.Describe(DescribeRequest()).epoch == 1

    responses = list(execute(stub, [prefill(), decode(1), decode(2)]))

    assert [(r.epoch, r.step, len(r.sampled)) for r in responses] == [(1, 0, 1), (1, 1, 1), (1, 2, 1)]
    assert all(response.compute_seconds > 0 for response in responses)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"protocol_version": 99}, grpc.StatusCode.FAILED_PRECONDITION),
        ({"block_size": 0}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"num_blocks": 17}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"max_model_len": 129}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"epoch": 0}, grpc.StatusCode.FAILED_PRECONDITION),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(
    stub: ShardServiceStub, loaded: Loaded, fields: dict[str, int], code: grpc.StatusCode
) -> None:
    assert code_of(lambda: stub.Configure(configuration(**fields))) is code


def test_a_lower_epoch_is_refused_and_so_are_its_commands(stub: ShardServiceStub, loaded: Loaded) -> None:
    stub.Configure(configuration(epoch=5))

    assert code_of(lambda: stub.Configure(configuration(epoch=5))) is grpc.StatusCode.FAILED_PRECONDITION
    zombie = execute(stub, [prefill(epoch=4)])
    assert code_of(lambda: next(zombie)) is grpc.StatusCode.FAILED_PRECONDITION
    assert next(execute(stub, [prefill(epoch=5)])).epoch == 5


def test_a_command_that_contradicts_the_slots_ends_the_stream(stub: ShardServiceStub, loaded: Loaded) -> None:
    stub.Configure(configuration())

    stream = execute(stub, [prefill(), prefill(step=1)])

    assert next(stream).step == 0
    assert code_of(lambda: next(stream)) is grpc.StatusCode.FAILED_PRECONDITION


def test_a_step_that_raises_is_internal_and_the_next_epoch_works(
    stub: ShardServiceStub, loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub.Configure(configuration())

    def explode(command: ExecuteRequest) -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(loaded.executor, "execute", explode)
        stream = execute(stub, [prefill()])
        with pytest.raises(grpc.RpcError, match="MemoryError: no room"):
            next(stream)

    stub.Configure(configuration(epoch=2))
    assert next(execute(stub, [prefill(epoch=2)])).step == 0


def test_a_broken_stream_drops_the_commands_that_wait(
    service: ShardService, stub: ShardServiceStub, loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub.Configure(configuration())
    started, release = threading.Event(), threading.Event()
    executed: list[int] = []
    real = loaded.executor.execute

    def slow(command: ExecuteRequest) -> Any:
        executed.append(command.step)
        started.set()
        release.wait(10)
        return real(command)

    monkeypatch.setattr(loaded.executor, "execute", slow)
    hold = threading.Event()

    def commands() -> Iterator[ExecuteRequest]:
        yield prefill()
        yield decode(1)
        hold.wait(10)

    stream = execute(stub, commands())
    assert started.wait(10)
    assert service.streaming
    stream.cancel()
    hold.set()
    release.set()
    # Runs on the compute thread after everything that was queued before it.
    monkeypatch.setattr(loaded.executor, "execute", real)
    stub.Configure(configuration(epoch=2))

    assert executed == [0]


@pytest.mark.parametrize(
    ("texts", "broken"),
    [
        (["ye", ""], None),
        (["ye", "no"], 1),
    ],
)
def test_what_there_is_of_outputs_is_tried_on_their_constraint(
    stub: ShardServiceStub,
    loaded: Loaded,
    service: ShardService,
    tmp_path: Path,
    texts: list[str],
    broken: Any,
) -> None:
    tokenizer = byte_level_bpe()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    service.loaded = replace(loaded, grammars=Grammars(tmp_path / "tokenizer.json", 500))
    priors = [PriorOutput(index=i, token_ids=tokenizer.encode(text).ids) for i, text in enumerate(texts)]
    ended = PriorOutput(index=2, token_ids=[*tokenizer.encode("yes").ids, 2], finished=True)

    request = PrepareConstraintRequest(
        constraint=Constraint(choice=Choices(values=["yes"])), prior_outputs=[*priors, ended]
    )

    assert stub.PrepareConstraint(request) == PrepareConstraintResponse(broken_output=broken)


def lose_rank(*_: Any) -> None:
    raise RankLostError("rank 1 didn't come")


def status_of(call: Any) -> tuple[grpc.StatusCode, str | None]:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code(), caught.value.details()


def test_a_rank_that_is_late_for_an_epoch_is_waited_for(
    stub: ShardServiceStub, loaded: Loaded, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loaded.executor, "configure", lose_rank)

    status = status_of(lambda: stub.Configure(configuration()))

    # What asks too much is RESOURCE_EXHAUSTED, and ends the scheduler.
    assert status == (grpc.StatusCode.UNAVAILABLE, "rank 1 didn't come")
    [line] = caplog.records
    assert (line.getMessage(), line.exc_info) == ("epoch 1 can't begin: rank 1 didn't come", None)


def test_a_rank_that_is_lost_within_a_step_is_no_fault_with_a_traceback(
    stub: ShardServiceStub, loaded: Loaded, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stub.Configure(configuration())
    monkeypatch.setattr(loaded.executor, "execute", lose_rank)

    status = status_of(lambda: list(execute(stub, [prefill()])))

    assert status == (grpc.StatusCode.UNAVAILABLE, "rank 1 didn't come")
    [line] = [record for record in caplog.records if record.levelname == "ERROR"]
    assert (line.getMessage(), line.exc_info) == ("a step failed: rank 1 didn't come", None)
