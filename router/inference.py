"""What the router does for a client, whichever way the client came: gRPC and HTTP are faces of this."""

import asyncio
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import grpc

from common.tokenizer import Tokenizer
from pagoda.v1 import inference_pb2 as pb
from router import metrics
from router.auth import Authenticator, Tenant
from router.config import RouterConfig
from router.errors import RETRY_DELAY_S, RequestError, invalid, unavailable
from router.generation import Generation
from router.output import Output
from router.prompt import PromptEncoder
from router.replicas import Replicas
from router.request_record import RequestRecord
from router.tool_calls import TAGS
from router.validation import Limits, Request, check_token_ids, validate

if TYPE_CHECKING:
    from common.otlp import Tracer

_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


@dataclass(frozen=True)
class Caller:
    """What a request's transport says of its client."""

    # As the log names it: a method of the API, or a path.
    method: str = ""
    # The client's deadline in seconds from now; None: it set none.
    time_remaining: float | None = None
    # A W3C traceparent, or nothing.
    trace_context: str = ""
    tenant: Tenant = Tenant()


def checked_trace_context(given: str) -> str:
    """`given` if it is a W3C traceparent, else nothing: a broken one is no fault of the request's."""
    return given if _TRACEPARENT.fullmatch(given) else ""


class OpenCalls:
    """Counts the calls whose clients don't have their answer yet. To be entered by each."""

    def __init__(self) -> None:
        self._count = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def __enter__(self) -> None:
        self._count += 1
        self._idle.clear()

    def __exit__(self, *_: object) -> None:
        self._count -= 1
        if not self._count:
            self._idle.set()

    async def wait_idle(self) -> None:
        """Returns once every client has its answer."""
        await self._idle.wait()


class Inference:
    """Serves one model. Keeps nothing between requests.

    Attributes:
        auth: Knows who calls.
        refusing: New requests are refused, because the router is about to end.
        model_name: As clients give it.
        tokenizer: The model's.
        tool_call_format: How the model writes tool calls, one of `tool_calls.FORMATS`; None: not known.
    """

    def __init__(
        self,
        config: RouterConfig,
        model_name: str,
        tokenizer: Tokenizer,
        prompts: PromptEncoder,
        replicas: Replicas,
        tool_call_format: str | None,
        tracer: "Tracer | None",
        auth: Authenticator,
    ) -> None:
        self.auth = auth
        self.refusing = False
        self.calls = OpenCalls()
        self.model_name = model_name
        self.tokenizer = tokenizer
        self.tool_call_format = tool_call_format
        self._config = config
        self._prompts = prompts
        self._replicas = replicas
        self._tracer = tracer
        self._running = 0

    @asynccontextmanager
    async def accepted(self, spec: pb.GenerateSpec, caller: Caller) -> AsyncIterator["Running"]:
        """A request from its acceptance by a scheduler to its end, however it ends.

        Raises:
            RequestError: it is invalid, or no scheduler takes it.
        """
        log_requests = self._config.log_requests
        record = RequestRecord(spec, caller, self.model_name, log_requests, self._tracer)
        with record, self._admitted():
            caller.tenant.check_budget()
            request = await validate(spec, self._limits(), self._prompts)
            record.named(request.request_id)
            generation = Generation(
                request,
                self._replicas,
                reconnect_timeout=self._config.reconnect_timeout,
                time_remaining=caller.time_remaining,
                trace_context=record.trace_context,
                on_resubmit=record.resubmitted,
                tenant=caller.tenant,
            )
            # Special tokens in some models, but their text is what a parser of calls goes by.
            tags = TAGS[self.tool_call_format] if spec.chat.tools and self.tool_call_format else frozenset()
            running = Running(request, self.tokenizer, generation, record, shown=tags)
            try:
                await generation.start()
                yield running
            finally:
                record.usage = running.usage()
                generation.close()

    def check_count(self, count: int, tenant: Tenant, field: str) -> None:
        """Refuses so many requests at once of which all have to run, if they never can.

        Raises:
            RequestError: INVALID_ARGUMENT, naming `field` and the limit.
        """
        limits = {
            "max_concurrent_requests of this key": tenant.max_concurrent_requests,
            "the router's --max-concurrent-requests": self._config.max_concurrent_requests,
        }
        for name, limit in limits.items():
            if 0 < limit < count:
                raise invalid(field, f"{count} at once, but {name} is {limit}; send fewer at a time")

    def model(self) -> pb.GetModelResponse:
        """What is served.

        Raises:
            RequestError: UNAVAILABLE, no scheduler ever connected.
        """
        welcome = self._replicas.welcome
        return pb.GetModelResponse(
            name=self.model_name,
            revision=welcome.model_revision,
            max_model_len=welcome.max_model_len,
            vocab_size=welcome.vocab_size,
            eos_token_ids=self.tokenizer.eos_token_ids,
            chat=self._prompts.has_chat,
            dtype=welcome.dtype,
            tool_call_format=self.tool_call_format or "",
        )

    async def tokenize(self, prompt: str | pb.Chat, field: str) -> Sequence[int]:
        """The token ids of a text or a chat, as a prompt has them. Errors name `field`."""
        with self._admitted():
            if isinstance(prompt, str):
                return await self._prompts.encode_text(prompt, field)
            return await self._prompts.encode_chat(prompt, field)

    async def detokenize(self, token_ids: Sequence[int], field: str) -> str:
        """The text of token ids, special tokens left out."""
        with self._admitted():
            limit = self._config.max_prompt_bytes
            if len(token_ids) > limit:
                raise invalid(field, f"{len(token_ids)} token ids, at most {limit} are taken")
            check_token_ids(token_ids, self.tokenizer.vocab_size, field)
            return await self.tokenizer.run(lambda: self.tokenizer.decode(token_ids))

    @contextmanager
    def _admitted(self) -> Iterator[None]:
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

    def _limits(self) -> Limits:
        welcome = self._replicas.welcome
        return Limits(
            self.model_name, welcome.max_model_len, welcome.vocab_size, self.tokenizer.eos_token_ids
        )


class Running:
    """An accepted request and its outputs.

    Attributes:
        request: As validated.
    """

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer,
        generation: Generation,
        record: RequestRecord,
        shown: frozenset[str],
    ) -> None:
        """`record` is told what is delivered; `shown` are the special tokens that have a text."""
        self.request = request
        self._record = record
        self._generation = generation
        self._outputs = [Output(index, request, tokenizer.detokenizer(shown)) for index in range(request.n)]
        for output, prior in zip(self._outputs, request.prior_outputs, strict=False):
            output.prime(prior.token_ids, prior.finished)

    async def deltas(self) -> AsyncIterator[pb.OutputDelta]:
        """What arrives, merged for as long as nobody asks for the next one."""
        while arrived := await self._generation.take():
            for message in arrived:
                output = self._outputs[message.output_index]
                delta = output.add(message)
                if output.finished:
                    self._generation.end_output(message.output_index, output.num_tokens)
                self._record.delivered(delta)
                yield delta

    async def whole(self) -> list[pb.OutputDelta]:
        """Each output in one piece, by index."""
        outputs = [pb.OutputDelta(index=index) for index in range(self.request.n)]
        texts: list[list[str]] = [[] for _ in outputs]
        async for delta in self.deltas():
            texts[delta.index].append(delta.text)
            outputs[delta.index].MergeFrom(delta)
        for output, parts in zip(outputs, texts, strict=True):
            output.text = "".join(parts)
        return outputs

    def prompt_logprobs(self) -> pb.PromptLogprobs | None:
        """One position per prompt token, if they were asked for.

        It fills as they come, and is whole once the first delta arrived or the request ended.
        """
        return self._generation.prompt_logprobs

    def accepted(self) -> pb.Accepted:
        """What a client needs to resume, and to know its prompt's size."""
        return pb.Accepted(
            request_id=self.request.request_id,
            seed=self.request.sampling.seed,
            model=self.request.model,
            model_revision=self._generation.model_revision,
            prompt_tokens=len(self.request.prompt_token_ids),
        )

    def usage(self) -> pb.Usage:
        """Tokens so far."""
        return pb.Usage(
            prompt_tokens=len(self.request.prompt_token_ids),
            completion_tokens=sum(output.num_tokens for output in self._outputs),
            cached_tokens=self._generation.cached_tokens,
        )
