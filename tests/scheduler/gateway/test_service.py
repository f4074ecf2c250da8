"""GatewayService over real gRPC, by the protocol's own client, on a fake shard."""

import asyncio
import contextlib
import hashlib
import io
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from common.probes import Probes
from common.rpc import SERVER_OPTIONS, bind
from scheduler.config import SchedulerConfig
from scheduler.engine import Engine
from scheduler.gateway.model import ServedModel
from scheduler.gateway.service import SERVICE, GatewayService
from tests.memory import uncollected
from tests.router.models import write_model
from tests.scheduler.fake_client import FakeShardClient
from tests.scheduler.fake_shard import expected_output
from tests.scheduler.gateway.asking import ask

Call = Any  # the package has no types


class Stack:
    """A scheduler without a process of its own, and a gateway's channel to it."""

    def __init__(self, folder: Path) -> None:
        self.shard = FakeShardClient()
        self.probes = Probes()
        config = SchedulerConfig(shard_addresses=("fake",), block_size=4, max_num_seqs=8)
        self.engine = Engine(config, self.shard, self.probes)
        self.service = GatewayService(self.engine, self.probes, ServedModel.read(folder, "tiny"))
        self.channel: Any = None
        self.stub: Any = None

    @contextlib.asynccontextmanager
    async def served(self) -> AsyncIterator["Stack"]:
        server = grpc.aio.server(options=SERVER_OPTIONS)
        server.add_generic_rpc_handlers((self.service.rpc_handler(),))
        port = bind(server, "127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as self.channel:
            self.stub = vllm_engine_pb2_grpc.VllmEngineStub(self.channel)
            yield self
        await server.stop(0)

    def num_requests(self) -> int:
        scheduler = self.engine.scheduler
        assert scheduler
        return len(scheduler.running) + len(scheduler.waiting)

    async def until_gone(self) -> None:
        """Until no request is left, and with it no block."""
        async with asyncio.timeout(5):
            await self.engine.wait_idle()
        assert self.engine.scheduler
        assert self.engine.scheduler.blocks.device.num_used == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
async def unready(folder: Path) -> AsyncIterator[Stack]:
    """The shard hasn't been there yet."""
    async with Stack(folder).served() as stack:
        yield stack


@pytest.fixture
async def stack(unready: Stack) -> AsyncIterator[Stack]:
    running = asyncio.create_task(unready.engine.run())
    await unready.engine.ready.wait()
    yield unready
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


async def read_all(call: Call) -> list[pb.GenerateResponse]:
    async with asyncio.timeout(10):
        return [response async for response in call]


async def status(call: Call) -> tuple[grpc.StatusCode, str]:
    async with asyncio.timeout(10):
        return await call.code(), await call.details()


async def test_a_whole_answer_is_one_message(stack: Stack) -> None:
    (response,) = await read_all(stack.stub.Generate(ask([1, 2, 3], max_tokens=30)))

    assert response.complete.output_ids == expected_output([1, 2, 3], 30)
    assert response.complete.finish_reason == "length"
    await stack.until_gone()


async def test_a_stream_brings_the_same_tokens_in_pieces(stack: Stack) -> None:
    responses = await read_all(stack.stub.Generate(ask([1, 2, 3], stream=True, max_tokens=30)))

    chunks = [one.chunk for one in responses if one.HasField("chunk")]
    assert len(chunks) > 1
    assert [token for one in chunks for token in one.token_ids] == expected_output([1, 2, 3], 30)
    assert responses[-1].complete.finish_reason == "length"


async def test_outputs_of_one_prompt_have_their_own_tokens(stack: Stack) -> None:
    responses = await read_all(stack.stub.Generate(ask([1, 2, 3], max_tokens=20, n=3)))

    outputs = {one.complete.index: list(one.complete.output_ids) for one in responses}
    assert outputs == {i: expected_output([1, 2, 3], 20, output_index=i) for i in range(3)}


async def test_the_model_s_own_stop_token_ends_an_output(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = expected_output([1, 2, 3], 30)
    monkeypatch.setattr(stack.service._model.tokenizer, "eos_token_ids", (tokens[4],))

    (response,) = await read_all(stack.stub.Generate(ask([1, 2, 3], max_tokens=30)))

    assert response.complete.output_ids == tokens[:5]
    assert response.complete.finish_reason == "stop"


async def test_a_caller_that_goes_away_frees_the_blocks(stack: Stack) -> None:
    stack.shard.may_answer.clear()
    calls = [stack.stub.Generate(ask([1, 2, 3], name, stream=True, max_tokens=200)) for name in "ab"]
    await stack.shard.until_sent(1)

    for call in calls:
        call.cancel()

    await stack.until_gone()


async def test_abort_ends_the_requests_that_it_names(stack: Stack) -> None:
    stack.shard.may_answer.clear()
    call, other = (stack.stub.Generate(ask([1, 2, 3], name, max_tokens=200)) for name in "ab")
    await stack.shard.until_sent(1)

    await stack.stub.Abort(pb.AbortRequest(request_ids=["a", "unknown"]))

    assert (await status(call))[0] is grpc.StatusCode.CANCELLED
    stack.shard.may_answer.set()
    (response,) = await read_all(other)
    assert response.complete.completion_tokens == 200


async def test_a_deadline_ends_the_request(stack: Stack) -> None:
    stack.shard.may_answer.clear()

    call = stack.stub.Generate(ask([1, 2, 3], max_tokens=200), timeout=0.2)

    assert (await status(call))[0] is grpc.StatusCode.DEADLINE_EXCEEDED
    await stack.until_gone()


async def test_an_id_that_is_here_already_is_refused_and_the_first_goes_on(stack: Stack) -> None:
    stack.shard.may_answer.clear()
    call = stack.stub.Generate(ask([1, 2, 3], max_tokens=30))
    await stack.shard.until_sent(1)

    code, _ = await status(stack.stub.Generate(ask([1], max_tokens=2)))

    assert code is grpc.StatusCode.ALREADY_EXISTS
    stack.shard.may_answer.set()
    (response,) = await read_all(call)
    assert response.complete.output_ids == expected_output([1, 2, 3], 30)


@pytest.mark.parametrize(
    ("request_", "code", "words"),
    [
        (ask([]), grpc.StatusCode.INVALID_ARGUMENT, "prompt: "),
        (ask([1000]), grpc.StatusCode.INVALID_ARGUMENT, "token id 1000"),
        (ask([1], stop_token_ids=[1000], min_tokens=1), grpc.StatusCode.INVALID_ARGUMENT, "token id 1000"),
        (ask([1] * 256), grpc.StatusCode.INVALID_ARGUMENT, "max_model_len is 256"),
        (ask([1], n=9), grpc.StatusCode.INVALID_ARGUMENT, "n: 9 is above max_num_seqs, which is 8"),
        (ask([1], top_p=2), grpc.StatusCode.INVALID_ARGUMENT, "sampling_params.top_p: 2 must be"),
        (pb.GenerateRequest(request_id="a", text="x"), grpc.StatusCode.UNIMPLEMENTED, "text: "),
    ],
)
async def test_refusals_name_what_is_wrong(
    stack: Stack, request_: pb.GenerateRequest, code: grpc.StatusCode, words: str
) -> None:
    given, details = await status(stack.stub.Generate(request_))

    assert given is code
    assert words in details
    assert stack.num_requests() == 0


async def test_what_a_refused_request_brought_goes_with_it(stack: Stack) -> None:
    refused, size = ask([1] * 500_000), 500_000
    with uncollected() as held:
        codes = [(await status(stack.stub.Generate(refused)))[0] for _ in range(10)]
        held_bytes = held()

    assert codes == [grpc.StatusCode.INVALID_ARGUMENT] * 10
    # gRPC holds a call or two that ended until the next ones come.
    assert held_bytes < 3 * size


async def test_garbage_fails_alone(stack: Stack) -> None:
    generate = stack.channel.unary_stream(f"/{SERVICE}/Generate")
    assert (await status(generate(b"\xff\xff")))[0] is grpc.StatusCode.INVALID_ARGUMENT

    (response,) = await read_all(stack.stub.Generate(ask([1, 2, 3], max_tokens=5)))
    assert response.complete.completion_tokens == 5


async def test_methods_that_are_not_served_say_so(stack: Stack) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.stub.Embed(pb.EmbedRequest())

    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_nothing_is_served_before_the_shard_is_there(unready: Stack) -> None:
    code, _ = await status(unready.stub.Generate(ask([1])))

    assert code is grpc.StatusCode.UNAVAILABLE
    assert not (await unready.stub.HealthCheck(pb.HealthCheckRequest())).healthy
    with pytest.raises(grpc.aio.AioRpcError, match="the replica is starting"):
        await unready.stub.GetModelInfo(pb.GetModelInfoRequest())


async def test_draining_refuses_new_requests_and_closing_ends_the_others(stack: Stack) -> None:
    stack.shard.may_answer.clear()
    call = stack.stub.Generate(ask([1, 2, 3], max_tokens=200))
    await stack.shard.until_sent(1)
    assert (await stack.stub.HealthCheck(pb.HealthCheckRequest())).healthy

    stack.engine.stop_admitting()
    assert not (await stack.stub.HealthCheck(pb.HealthCheckRequest())).healthy
    assert (await status(stack.stub.Generate(ask([1], "b"))))[0] is grpc.StatusCode.UNAVAILABLE

    stack.service.close()
    assert await status(call) == (grpc.StatusCode.UNAVAILABLE, "the replica is shutting down")
    await stack.until_gone()


async def test_a_gateway_learns_what_is_served(stack: Stack, folder: Path) -> None:
    model = await stack.stub.GetModelInfo(pb.GetModelInfoRequest())
    server = await stack.stub.GetServerInfo(pb.GetServerInfoRequest())

    assert (model.served_model_name, model.tokenizer_path, model.model_type) == ("tiny", str(folder), "llama")
    assert (model.max_context_length, model.vocab_size, model.eos_token_ids) == (256, 1000, [1])
    assert (server.max_num_seqs, server.block_size, server.model_dtype) == (8, 4, "float32")


async def test_load_counts_requests_and_the_tokens_of_their_blocks(stack: Stack) -> None:
    stack.shard.may_answer.clear()
    call = stack.stub.Generate(ask([1, 2, 3], max_tokens=5))
    await stack.shard.until_sent(1)

    (load,) = (await stack.stub.GetLoads(pb.GetLoadsRequest())).loads

    assert (load.num_running_reqs, load.num_waiting_reqs, load.max_running_requests) == (1, 0, 8)
    assert (load.num_used_tokens, load.max_total_num_tokens, load.token_usage) == (4, 256, 1 / 64)
    call.cancel()


async def test_the_tokenizer_comes_as_an_archive_with_its_hash(stack: Stack, folder: Path) -> None:
    call = stack.stub.GetTokenizer(common_pb2.GetTokenizerRequest())
    chunks = [chunk async for chunk in call]

    archive = b"".join(chunk.data for chunk in chunks)
    assert chunks[-1].sha256 == hashlib.sha256(archive).hexdigest()
    with zipfile.ZipFile(io.BytesIO(archive)) as files:
        assert files.read("tokenizer.json") == (folder / "tokenizer.json").read_bytes()
        assert "tokenizer_config.json" in files.namelist()


async def test_flushing_forgets_cached_prefixes(stack: Stack) -> None:
    await read_all(stack.stub.Generate(ask([1, 2, 3, 4, 5], max_tokens=5)))

    flushed = await stack.stub.FlushCache(common_pb2.FlushCacheRequest())

    assert flushed.success
    (response,) = await read_all(stack.stub.Generate(ask([1, 2, 3, 4, 5], max_tokens=5)))
    assert response.complete.cached_tokens == 0
