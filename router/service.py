"""pagoda.v1.InferenceService."""

import asyncio
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError, Message

from pagoda.v1 import inference_pb2 as pb
from router import metrics
from router.config import RouterConfig
from router.errors import RETRY_DELAY_S, RequestError, invalid, unavailable
from router.generation import Generation
from router.output import Output
from router.prompt import PromptEncoder
from router.replicas import Replicas
from router.tokenizer import Tokenizer
from router.validation import Limits, Request, check_token_ids, validate

SERVICE_NAME: Final = "pagoda.v1.InferenceService"

# A status waits behind what a stalled client doesn't read; gRPC goes on trying after that.
_ABORT_TIMEOUT_S: Final = 1.0
_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")

_log = logging.getLogger(__name__)

Context = Any  # grpc.aio.ServicerContext; its stubs lack what is used here
Handler = Callable[[Any, Context], Awaitable[Message | None]]


class InferenceService:
    """Serves one model. Keeps nothing between requests.

    Attributes:
        refusing: New requests are refused, because the router is about to end.
    """

    def __init__(
        self,
        config: RouterConfig,
        model_name: str,
        tokenizer: Tokenizer,
        prompts: PromptEncoder,
        replicas: Replicas,
    ) -> None:
        self.refusing = False
        self._config = config
        self._model_name = model_name
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._replicas = replicas
        self._running = 0
        self._open_calls = 0
        self._idle = asyncio.Event()
        self._idle.set()

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

    async def wait_idle(self) -> None:
        """Returns once no call is open: every client has its status."""
        await self._idle.wait()

    def _open(self, context: Context) -> None:
        self._open_calls += 1
        self._idle.clear()
        context.add_done_callback(self._on_done)

    def _on_done(self, context: Context) -> None:
        self._open_calls -= 1
        if not self._open_calls:
            self._idle.set()

    def _method(self, name: str, request_type: type[Message], handler: Handler) -> Any:
        """`handler` with parsing, error mapping and metrics around it."""

        async def call(data: bytes, context: Context) -> bytes | None:
            self._open(context)
            start = time.monotonic()
            code = "OK"
            error: RequestError
            try:
                response = await handler(_parse(request_type, data), context)
                return None if response is None else response.SerializeToString()
            except RequestError as failure:
                error = failure
                code = error.code.name
            except asyncio.CancelledError:
                remaining = context.time_remaining()
                code = "CANCELLED" if remaining is None or remaining > 0 else "DEADLINE_EXCEEDED"
                raise
            except Exception:
                incident = uuid.uuid4().hex
                _log.exception("%s failed, incident %s", name, incident)
                message = f"internal error; the router's log has more under incident {incident}"
                error = RequestError(grpc.StatusCode.INTERNAL, message, reason="INTERNAL")
                code = error.code.name
            finally:
                metrics.REQUESTS.labels(name, code).inc()
                metrics.REQUEST_DURATION.labels(name).observe(time.monotonic() - start)
            await _abort(context, error)
            return None

        return call

    @asynccontextmanager
    async def _admitted(self) -> AsyncIterator[None]:
        if self.refusing:
            raise unavailable("this router is shutting down; use another one", "SHUTTING_DOWN")
        limit = self._config.max_concurrent_requests
        if self._running >= limit:
            raise RequestError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{limit} requests run already; try again later",
                reason="TOO_MANY_REQUESTS",
                retry_delay=RETRY_DELAY_S,
            )
        self._running += 1
        metrics.RUNNING.set(self._running)
        try:
            yield
        finally:
            self._running -= 1
            metrics.RUNNING.set(self._running)

    @asynccontextmanager
    async def _accepted(self, spec: pb.GenerateSpec, context: Context) -> AsyncIterator["_Running"]:
        """A request from its acceptance by a scheduler to its end, however it ends."""
        async with self._admitted():
            request = await validate(spec, self._limits(), self._prompts)
            running = _Running(request, self._tokenizer, self._new_generation(request, context))
            try:
                await running.generation.start()
                yield running
            finally:
                running.generation.close()

    def _limits(self) -> Limits:
        welcome = self._replicas.welcome
        return Limits(
            self._model_name, welcome.max_model_len, welcome.vocab_size, self._tokenizer.eos_token_ids
        )

    def _new_generation(self, request: Request, context: Context) -> Generation:
        trace_context = dict(context.invocation_metadata() or ()).get("traceparent", "")
        return Generation(
            request,
            self._replicas,
            reconnect_timeout=self._config.reconnect_timeout,
            time_remaining=context.time_remaining(),
            trace_context=trace_context if _TRACEPARENT.fullmatch(trace_context) else "",
        )

    async def _generate(self, message: pb.GenerateRequest, context: Context) -> pb.GenerateResponse:
        async with self._accepted(message.spec, context) as running:
            outputs = [pb.OutputDelta(index=index) for index in range(running.request.n)]
            texts: list[list[str]] = [[] for _ in outputs]
            async for delta in running.deltas():
                texts[delta.index].append(delta.text)
                outputs[delta.index].MergeFrom(delta)
            for output, parts in zip(outputs, texts, strict=True):
                output.text = "".join(parts)
            return pb.GenerateResponse(accepted=running.accepted(), outputs=outputs, usage=running.usage())

    async def _generate_stream(self, message: pb.GenerateStreamRequest, context: Context) -> None:
        async with self._accepted(message.spec, context) as running:
            await self._write(context, pb.GenerateStreamResponse(accepted=running.accepted()))
            async for delta in running.deltas():
                await self._write(context, pb.GenerateStreamResponse(delta=delta))
            await self._write(context, pb.GenerateStreamResponse(usage=running.usage()))

    async def _write(self, context: Context, response: pb.GenerateStreamResponse) -> None:
        limit = self._config.write_stall_timeout
        try:
            async with asyncio.timeout(limit):
                await context.write(response.SerializeToString())
        except TimeoutError:
            message = f"the client took nothing for {limit:g} s; resume with prior_outputs"
            raise RequestError(grpc.StatusCode.RESOURCE_EXHAUSTED, message, reason="CLIENT_STALLED") from None

    async def _get_model(self, message: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        welcome = self._replicas.welcome
        return pb.GetModelResponse(
            name=self._model_name,
            revision=welcome.model_revision,
            max_model_len=welcome.max_model_len,
            vocab_size=welcome.vocab_size,
            eos_token_ids=self._tokenizer.eos_token_ids,
            chat=self._prompts.has_chat,
            dtype=welcome.dtype,
        )

    async def _tokenize(self, message: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        async with self._admitted():
            match message.WhichOneof("prompt"):
                case "text":
                    ids = await self._prompts.encode_text(message.text, "text")
                case "chat":
                    ids = await self._prompts.encode_chat(message.chat, "chat")
                case _:
                    raise invalid("prompt", "is missing; give text or chat", "EMPTY_PROMPT")
            return pb.TokenizeResponse(token_ids=ids)

    async def _detokenize(self, message: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        async with self._admitted():
            ids, limit = message.token_ids, self._config.max_prompt_bytes
            if len(ids) > limit:
                raise invalid("token_ids", f"{len(ids)} token ids, at most {limit} are taken")
            check_token_ids(ids, self._tokenizer.vocab_size, "token_ids")
            text = await self._tokenizer.run(lambda: self._tokenizer.decode(ids))
            return pb.DetokenizeResponse(text=text)


class _Running:
    """An accepted request and its outputs."""

    def __init__(self, request: Request, tokenizer: Tokenizer, generation: Generation) -> None:
        self.request = request
        self.generation = generation
        self._outputs = [Output(index, request, tokenizer.detokenizer()) for index in range(request.n)]
        for output, prior in zip(self._outputs, request.prior_outputs, strict=False):
            output.prime(prior.token_ids, prior.finished)

    async def deltas(self) -> AsyncIterator[pb.OutputDelta]:
        """What arrives, merged for as long as nobody asks for the next one."""
        while arrived := await self.generation.take():
            for message in arrived:
                output = self._outputs[message.output_index]
                delta = output.add(message)
                if output.finished:
                    self.generation.end_output(message.output_index, output.num_tokens)
                yield delta

    def accepted(self) -> pb.Accepted:
        """The stream's first message."""
        return pb.Accepted(
            request_id=self.request.request_id,
            seed=self.request.sampling.seed,
            model=self.request.model,
            model_revision=self.generation.model_revision,
            prompt_tokens=len(self.request.prompt_token_ids),
        )

    def usage(self) -> pb.Usage:
        """The stream's last message."""
        return pb.Usage(
            prompt_tokens=len(self.request.prompt_token_ids),
            completion_tokens=sum(output.num_tokens for output in self._outputs),
            cached_tokens=self.generation.cached_tokens,
        )


def _parse(request_type: type[Message], data: bytes) -> Message:
    try:
        return request_type.FromString(data)
    except DecodeError as error:
        message = f"the request isn't a {request_type.DESCRIPTOR.full_name}: {error}"
        raise RequestError(grpc.StatusCode.INVALID_ARGUMENT, message, reason="BROKEN_MESSAGE") from error


async def _abort(context: Context, error: RequestError) -> None:
    status = error.status()
    try:
        async with asyncio.timeout(_ABORT_TIMEOUT_S):
            await context.abort(status.code, status.details, status.trailing_metadata)
    except grpc.aio.AbortError:
        raise
    except Exception:  # the client is stalled or gone, which the core says in more ways than one
        raise asyncio.CancelledError from None
