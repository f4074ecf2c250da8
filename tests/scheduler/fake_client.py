"""A shard in this process, behind the scheduler's client interface."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from common.version import PROTOCOL_VERSION
from pagoda.shard.v1.shard_pb2 import (
    ConfigureRequest,
    ConfigureResponse,
    DescribeResponse,
    ExecuteRequest,
    ExecuteResponse,
)
from pagoda.v1.inference_pb2 import Constraint, PriorOutput
from scheduler.shard_client import ConfigurationError, ConstraintRefusedError, ShardError
from tests.scheduler.fake_shard import VOCAB_SIZE, FakeShard


def description(**fields: object) -> DescribeResponse:
    """64 blocks of 4 tokens, unless told otherwise."""
    response = DescribeResponse(
        protocol_version=PROTOCOL_VERSION,
        model_revision="revision",
        dtype="float32",
        device="cpu",
        vocab_size=VOCAB_SIZE,
        max_model_len=256,
        kv_bytes_per_token=1,
        kv_capacity_bytes=256,
    )
    response.MergeFrom(DescribeResponse(**fields))  # type: ignore[arg-type]
    return response


class FakeStream:
    """Executes a command when its result is asked for, so that two can be in flight."""

    def __init__(self, client: "FakeShardClient") -> None:
        self._client = client
        self._commands: asyncio.Queue[ExecuteRequest | None] = asyncio.Queue()

    async def send(self, command: ExecuteRequest) -> None:
        self._client.record(command)
        await self._commands.put(command)

    async def results(self) -> AsyncIterator[ExecuteResponse]:
        while command := await self._commands.get():
            await self._client.may_answer.wait()
            yield self._client.answer(command)
        raise ShardError("the shard closed the step stream")

    async def close(self) -> None:
        self.break_now()

    def break_now(self) -> None:
        """As if the connection were gone."""
        self._commands.put_nowait(None)


class FakeShardClient:
    """Counts epochs as a shard does; `lose` breaks the stream and forgets everything."""

    def __init__(self, described: DescribeResponse | None = None) -> None:
        self.described = described or description()
        self.commands: list[ExecuteRequest] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.configured: list[ConfigureRequest] = []
        self.away = False
        self.configuration_error = ""
        # Constraints that were asked for; none is compiled before `may_prepare`.
        self.prepared: list[Constraint] = []
        self.may_prepare = asyncio.Event()
        self.may_prepare.set()
        self.constraint_error = ""
        self.broken_outputs: list[PriorOutput] = []
        self.invalid = False
        self.failing = False
        self._sent = asyncio.Event()
        self._stream: FakeStream | None = None
        self._shard: FakeShard | None = None

    async def describe(self) -> DescribeResponse:
        if self.away:
            raise ShardError("UNAVAILABLE: loading 10 %")
        copy = DescribeResponse()
        copy.CopyFrom(self.described)
        return copy

    async def configure(self, request: ConfigureRequest) -> ConfigureResponse:
        assert request.epoch > self.described.epoch
        if self.configuration_error:
            raise ConfigurationError(self.configuration_error)
        self.described.epoch = request.epoch
        self.configured.append(request)
        self._shard = FakeShard.configured(request)
        return ConfigureResponse(epoch=request.epoch)

    async def prepare_constraint(
        self, constraint: Constraint, prior_outputs: Sequence[PriorOutput] = ()
    ) -> None:
        self.prepared.append(constraint)
        self._sent.set()
        await self.may_prepare.wait()
        if self.away:
            raise ShardError("UNAVAILABLE: loading 10 %")
        if self.constraint_error:
            raise ConstraintRefusedError(self.constraint_error)
        if any(prior in self.broken_outputs for prior in prior_outputs):
            raise ConstraintRefusedError("not so", "spec.prior_outputs")

    async def until_asked(self, count: int) -> None:
        """Waits until `count` constraints were asked for since the start."""
        await self._until(lambda: len(self.prepared) >= count)

    def execute(self) -> FakeStream:
        self._stream = FakeStream(self)
        return self._stream

    def record(self, command: ExecuteRequest) -> None:
        self.commands.append(command)
        self._sent.set()

    async def until_sent(self, count: int) -> None:
        """Waits for `count` commands since the start."""
        await self._until(lambda: len(self.commands) >= count)

    async def _until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                self._sent.clear()
                await self._sent.wait()

    def answer(self, command: ExecuteRequest) -> ExecuteResponse:
        assert self._shard
        if self.failing:
            raise ShardError("INTERNAL: a step failed")
        response = self._shard.execute(command)
        for sampled in response.sampled:
            sampled.invalid = self.invalid
        return response

    def lose(self) -> None:
        assert self._stream
        self._stream.break_now()

    async def close(self) -> None:
        pass
