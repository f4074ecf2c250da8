"""pagoda.v1.InferenceService: the gRPC face."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError, Message

from common import rpc
from pagoda.v1 import inference_pb2 as pb
from router import metrics
from router.auth import Authenticator
from router.errors import RequestError, internal, invalid
from router.inference import Caller, Inference, checked_trace_context
from router.stall import StallWatch

SERVICE_NAME: Final = "pagoda.v1.InferenceService"

# A status waits behind what a stalled client doesn't read; gRPC goes on trying after that.
_ABORT_TIMEOUT_S: Final = 1.0

Context = Any  # grpc.aio.ServicerContext; its stubs lack what is used here
Status = Any  # grpc.Status, as grpc_status makes it
Handler = Callable[[Any, Caller, Context], Awaitable[Message | None]]


class InferenceService:
    """Methods that take and give bytes."""

    def __init__(self, inference: Inference, write_stall_timeout: float) -> None:
        """A client that takes nothing for `write_stall_timeout` seconds is ended."""
        self._inference = inference
        self._write_stall_timeout = write_stall_timeout

    def rpc_handler(self) -> "grpc.GenericRpcHandler[Any, Any]":
        """All methods. They take bytes: grpc.aio would answer broken protobuf with UNKNOWN."""
        unary = grpc.unary_unary_rpc_method_handler
        methods = {
            "Generate": unary(self._method("Generate", pb.GenerateRequest, self._generate)),
            "GenerateStream": grpc.unary_stream_rpc_method_handler(
                self._method("GenerateStream", pb.GenerateStreamRequest, self._generate_stream)
            ),
            "GetModel": unary(self._method("GetModel", pb.GetModelRequest, self._get_model)),
            "Tokenize": unary(self._method("Tokenize", pb.TokenizeRequest, self._tokenize)),
            "Detokenize": unary(self._method("Detokenize", pb.DetokenizeRequest, self._detokenize)),
        }
        return grpc.method_handlers_generic_handler(SERVICE_NAME, methods)

    def _method(self, name: str, request_type: type[Message], handler: Handler) -> Any:
        """`handler` with authentication, parsing, error mapping and metrics around it."""

        async def call(data: bytes, context: Context) -> bytes | None:
            # Not counted out by `context.add_done_callback`, which would make a cycle of the call.
            with self._inference.calls:
                start = time.monotonic()
                code = "OK"
                try:
                    caller = self._caller(name, context)
                    response = await handler(_parse(request_type, data), caller, context)
                    return None if response is None else response.SerializeToString()
                except RequestError as error:
                    status, code = error.status(), error.code.name
                    metrics.ERRORS.labels(error.reason).inc()
                except asyncio.CancelledError:
                    remaining = context.time_remaining()
                    code = "CANCELLED" if remaining is None or remaining > 0 else "DEADLINE_EXCEEDED"
                    raise
                except Exception:
                    unforeseen = internal(name)
                    status, code = unforeseen.status(), unforeseen.code.name
                    metrics.ERRORS.labels(unforeseen.reason).inc()
                finally:
                    metrics.count_call(name, code, time.monotonic() - start)
                await _abort(context, status)
                return None

        return call

    def _caller(self, method: str, context: Context) -> Caller:
        metadata = dict(context.invocation_metadata() or ())
        trace_context = metadata.get("traceparent", "")
        return Caller(
            method=method,
            time_remaining=context.time_remaining(),
            trace_context=checked_trace_context(trace_context),
            tenant=self._inference.auth.authenticate(metadata.get("authorization")),
        )

    async def _generate(
        self, message: pb.GenerateRequest, caller: Caller, context: Context
    ) -> pb.GenerateResponse:
        async with self._inference.accepted(message.spec, caller) as running:
            outputs = await running.whole()
            return pb.GenerateResponse(
                accepted=running.accepted(),
                outputs=outputs,
                usage=running.usage(),
                prompt_logprobs=running.prompt_logprobs(),
            )

    async def _generate_stream(
        self, message: pb.GenerateStreamRequest, caller: Caller, context: Context
    ) -> None:
        async with self._reading() as watch, self._inference.accepted(message.spec, caller) as running:

            async def write(response: pb.GenerateStreamResponse) -> None:
                with watch:
                    await context.write(response.SerializeToString())

            await write(pb.GenerateStreamResponse(accepted=running.accepted()))
            prompt_logprobs = running.prompt_logprobs()
            async for delta in running.deltas():
                if prompt_logprobs is not None:
                    await write(pb.GenerateStreamResponse(prompt_logprobs=prompt_logprobs))
                    prompt_logprobs = None
                await write(pb.GenerateStreamResponse(delta=delta))
            await write(pb.GenerateStreamResponse(usage=running.usage()))

    @asynccontextmanager
    async def _reading(self) -> AsyncIterator[StallWatch]:
        """Lasts for as long as the client reads what is written under the watch.

        Raises:
            RequestError: it took nothing for too long.
        """
        limit = self._write_stall_timeout
        try:
            async with asyncio.timeout(None) as patience:
                with closing(StallWatch(limit, lambda: patience.reschedule(0))) as watch:
                    yield watch
        except TimeoutError:
            if not patience.expired():
                raise
            message = f"the client took nothing for {limit:g} s; resume with prior_outputs"
            raise RequestError(grpc.StatusCode.RESOURCE_EXHAUSTED, message, reason="CLIENT_STALLED") from None

    async def _get_model(
        self, message: pb.GetModelRequest, caller: Caller, context: Context
    ) -> pb.GetModelResponse:
        return self._inference.model()

    async def _tokenize(
        self, message: pb.TokenizeRequest, caller: Caller, context: Context
    ) -> pb.TokenizeResponse:
        match message.WhichOneof("prompt"):
            case "text":
                ids = await self._inference.tokenize(message.text, "text")
            case "chat":
                ids = await self._inference.tokenize(message.chat, "chat")
            case _:
                raise invalid("prompt", "is missing; give text or chat", "EMPTY_PROMPT")
        return pb.TokenizeResponse(token_ids=ids)

    async def _detokenize(
        self, message: pb.DetokenizeRequest, caller: Caller, context: Context
    ) -> pb.DetokenizeResponse:
        text = await self._inference.detokenize(message.token_ids, "token_ids")
        return pb.DetokenizeResponse(text=text)


class KeyGuard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Asks for a key where no service of ours does: everywhere but at health, so for reflection."""

    def __init__(self, auth: Authenticator) -> None:
        self._auth = auth

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        service = handler_call_details.method.removeprefix("/").partition("/")[0]
        if service not in (SERVICE_NAME, rpc.HEALTH_SERVICE_NAME):
            try:
                self._auth.authenticate(dict(handler_call_details.invocation_metadata).get("authorization"))
            except RequestError as error:
                return _refusing(error.status())
        return await continuation(handler_call_details)


def _refusing(status: Status) -> "grpc.RpcMethodHandler[Any, Any]":
    """A method that refuses, whatever its client sends."""

    async def refuse(requests: Any, context: Context) -> None:
        await _abort(context, status)

    return grpc.stream_stream_rpc_method_handler(refuse)


def _parse(request_type: type[Message], data: bytes) -> Message:
    try:
        return request_type.FromString(data)
    except DecodeError as error:
        message = f"the request isn't a {request_type.DESCRIPTOR.full_name}: {error}"
        raise RequestError(grpc.StatusCode.INVALID_ARGUMENT, message, reason="BROKEN_MESSAGE") from error


async def _abort(context: Context, status: Status) -> None:
    try:
        async with asyncio.timeout(_ABORT_TIMEOUT_S):
            await rpc.abort(context, status.code, status.details, status.trailing_metadata)
    except Exception:  # the client is stalled or gone, which the core says in more ways than one
        raise asyncio.CancelledError from None
