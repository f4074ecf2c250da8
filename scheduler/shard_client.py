"""The scheduler's end of a shard's contract."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

import grpc

from common.rpc import aio_channel
from common.tls import ClientTls
from pagoda.shard.v1.shard_pb2 import (
    ConfigureRequest,
    ConfigureResponse,
    DescribeRequest,
    DescribeResponse,
    ExecuteRequest,
    ExecuteResponse,
    PrepareConstraintRequest,
)
from pagoda.shard.v1.shard_pb2_grpc import ShardServiceStub
from pagoda.v1.inference_pb2 import Constraint, PriorOutput

if TYPE_CHECKING:
    from pagoda.shard.v1.shard_pb2_grpc import ShardServiceAsyncStub


EXECUTE: Final = "/pagoda.shard.v1.ShardService/Execute"


class ShardError(Exception):
    """The shard is away or a step failed. Everything that it held is lost; requests rejoin by recompute."""


class ConfigurationError(ShardError):
    """The shard can't be configured like this, now or later."""


class ConstraintRefusedError(Exception):
    """The shard can't honour a constraint; the message is for the client, about `field` of its request."""

    def __init__(self, message: str | None, field: str = "spec.constraint") -> None:
        super().__init__(message)
        self.field = field


class StepStream(Protocol):
    """An open `Execute`: commands go in, and results come back in the same order."""

    async def send(self, command: ExecuteRequest) -> None:
        """Sends one command."""

    def results(self) -> AsyncIterator[ExecuteResponse]:
        """Yields results; raises ShardError when the stream breaks."""

    async def close(self) -> None:
        """Ends the stream; commands not yet executed are dropped."""


class ShardClient(Protocol):
    """One shard. Tests put one into this process behind the same methods."""

    async def describe(self) -> DescribeResponse:
        """What the shard holds; raises ShardError while it loads or is away."""

    async def configure(self, request: ConfigureRequest) -> ConfigureResponse:
        """Starts an epoch."""

    async def prepare_constraint(
        self, constraint: Constraint, prior_outputs: Sequence[PriorOutput] = ()
    ) -> None:
        """Returns once joins may carry it; raises ConstraintRefusedError, or ShardError while it is away."""

    def execute(self) -> StepStream:
        """Opens the step stream of the configured epoch."""

    async def close(self) -> None:
        """Releases the connection."""


class GrpcStepStream:
    """`Execute` over gRPC."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        # Of bytes, so that many ranks' command is serialised once.
        execute: Any = channel.stream_stream(EXECUTE, None, ExecuteResponse.FromString)
        # Called without an iterator, it takes commands through write().
        self._call: grpc.aio.StreamStreamCall[bytes, ExecuteResponse] = execute()

    async def send(self, command: ExecuteRequest) -> None:
        """Sends one command; a broken stream shows in `results`."""
        await self.write(command.SerializeToString())

    async def write(self, command: bytes) -> None:
        """Sends one serialised command."""
        try:
            await self._call.write(command)
        except (grpc.RpcError, grpc.aio.UsageError, asyncio.InvalidStateError) as error:
            raise ShardError(f"the shard's step stream broke: {_describe(error)}") from error

    async def results(self) -> AsyncIterator[ExecuteResponse]:
        """Yields results in the order of the commands."""
        try:
            async for response in self._call:
                yield response
        except grpc.RpcError as error:
            raise ShardError(f"the shard's step stream broke: {_describe(error)}") from error
        raise ShardError("the shard closed the step stream")

    async def close(self) -> None:
        """Cancels the call."""
        self._call.cancel()


class GrpcShardClient:
    """A shard at an address."""

    def __init__(self, address: str, tls: ClientTls | None = None) -> None:
        self._address = address
        self._tls = tls
        self._connect()

    def _connect(self) -> None:
        self._channel = aio_channel(self._address, self._tls)
        self._stub: ShardServiceAsyncStub = ShardServiceStub(self._channel)

    async def describe(self) -> DescribeResponse:
        """What the shard holds. Connects anew: certificates may have been renewed since the last time."""
        await self.close()
        self._connect()
        try:
            return await self._stub.Describe(DescribeRequest(), timeout=5)
        except grpc.RpcError as error:
            raise ShardError(_describe(error)) from error

    async def configure(self, request: ConfigureRequest) -> ConfigureResponse:
        """Starts an epoch: allocates, warms up."""
        try:
            return await self._stub.Configure(request, timeout=600)
        except grpc.RpcError as error:
            hopeless = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)
            kind = ConfigurationError if error.code() in hopeless else ShardError
            raise kind(_describe(error)) from error

    async def prepare_constraint(
        self, constraint: Constraint, prior_outputs: Sequence[PriorOutput] = ()
    ) -> None:
        """Compiles it there, or finds it compiled, and has it tried on outputs that shall go on."""
        request = PrepareConstraintRequest(constraint=constraint, prior_outputs=prior_outputs)
        try:
            response = await self._stub.PrepareConstraint(request, timeout=120)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                raise ConstraintRefusedError(error.details()) from error
            raise ShardError(_describe(error)) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task and task.cancelling():
                raise
            # So gRPC says that `describe` closed the channel meanwhile.
            raise ShardError("the connection was made anew") from None
        if response.HasField("broken_output"):
            message = f"output {response.broken_output} has tokens that spec.constraint doesn't allow"
            raise ConstraintRefusedError(message, "spec.prior_outputs")

    def execute(self) -> GrpcStepStream:
        """Opens the step stream."""
        return GrpcStepStream(self._channel)

    async def close(self) -> None:
        """Closes the channel."""
        await self._channel.close(None)


def _describe(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error)
