"""One request's life: submitted, and submitted anew whenever its scheduler is lost."""

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Final

import grpc
from google.protobuf.duration_pb2 import Duration

from pagoda.scheduler.v1.scheduler_pb2 import RequestKey, RequestRefused, SequenceOutput, Submit
from pagoda.v1.inference_pb2 import PriorOutput, PromptLogprobs
from pagoda.v1.sampling_pb2 import PositionLogprobs
from router import metrics
from router.affinity import block_hashes
from router.auth import Tenant
from router.errors import RETRYABLE, RequestError, from_refusal, unavailable
from router.replicas import Replicas
from router.scheduler_link import Connection, Key
from router.validation import Request

# What one scheduler finds invalid there, all do; else it is too large for that one's limits alone.
_OF_NO_REPLICA: Final = ("spec.constraint", "spec.prior_outputs")


class Generation:
    """What arrives for a request, across schedulers, as one continuous stream of tokens.

    What its client hasn't taken yet waits as one merged message per output.

    Attributes:
        model_revision: Of the scheduler that accepted, or the client's; another one is never taken.
        cached_tokens: Prompt tokens found in the prefix cache at the first attempt.
        prompt_logprobs: As far as they came; None if they weren't asked for.
    """

    def __init__(
        self,
        request: Request,
        replicas: Replicas,
        *,
        reconnect_timeout: float,
        time_remaining: float | None = None,
        trace_context: str = "",
        on_resubmit: Callable[[], None] = lambda: None,
        tenant: Tenant = Tenant(),
    ) -> None:
        """`time_remaining` is the client's deadline, and `reconnect_timeout` how long an outage of all
        schedulers is borne; both in seconds. `on_resubmit` is called when a lost scheduler is replaced."""
        self.model_revision = request.model_revision
        self.cached_tokens = 0
        self.prompt_logprobs: PromptLogprobs | None = None
        if request.prompt_logprobs is not None:
            # The first token, which nothing precedes, is there already.
            self.prompt_logprobs = PromptLogprobs(positions=[PositionLogprobs()])
        self._request = request
        self._replicas = replicas
        self._reconnect_timeout = reconnect_timeout
        self._trace_context = trace_context
        self._on_resubmit = on_resubmit
        self._tenant = tenant
        self._arrival = time.monotonic()
        self._deadline = None if time_remaining is None else self._arrival + time_remaining
        priors = request.prior_outputs
        self._token_ids = [list(prior.token_ids) for prior in priors] or [[] for _ in range(request.n)]
        self._finished = [prior.finished for prior in priors] or [False] * request.n
        self._last_arrival = [0.0] * request.n
        self._pending: dict[int, SequenceOutput] = {}
        # An asyncio.Event would cost more for each token; nobody but `_advance` waits.
        self._waiting: asyncio.Future[None] | None = None
        self._has_news = False
        self._error: RequestError | None = None
        self._accepted = False
        # The attempt that runs now.
        self._connection: Connection | None = None
        self._key: Key = ("", 0)
        # While none runs: since when, and who refused it.
        self._lost_at: float | None = None
        self._refusal: RequestError | None = None
        self._refusers: set[Connection] = set()

    async def start(self) -> None:
        """Returns once a scheduler accepted.

        Raises:
            RequestError: none did.
        """
        if all(self._finished):
            self.model_revision = self._replicas.welcome.model_revision
            return
        while not self._accepted:
            await self._advance()

    async def take(self) -> list[SequenceOutput]:
        """What arrived since the last call, at most one per output; waits for some. Empty at the end.

        Nothing is given out before the prompt's log-probabilities are whole, where they were asked for.

        Raises:
            RequestError: the scheduler gave it up, or none came back in time.
        """
        while not self._pending or self._lacks_prompt_logprobs:
            if all(self._finished):
                break
            await self._advance()
        taken, self._pending = list(self._pending.values()), {}
        return taken

    def end_output(self, index: int, num_tokens: int) -> None:
        """Ends an output after its first `num_tokens` tokens, if its scheduler didn't."""
        self._pending.pop(index, None)
        if self._finished[index]:
            return
        self._finished[index] = True
        del self._token_ids[index][num_tokens:]
        if all(self._finished):
            self.close()
        elif self._connection is not None:
            self._connection.abort(self._key, index)

    def close(self) -> None:
        """Frees what the scheduler still holds for it. To be called however the request ends."""
        # An error that was raised leads back here, and to all that the client sent.
        self._error = self._refusal = None
        if self._connection is not None:
            self._connection.abort(self._key)
            self._connection = None

    def on_accepted(self) -> None:
        assert self._connection is not None  # noqa: S101
        if not self._accepted:
            metrics.PROMPT_TOKENS.inc(len(self._request.prompt_token_ids))
            self._tenant.use_tokens(len(self._request.prompt_token_ids))
        self.model_revision = self._connection.welcome.model_revision
        self._accepted = True
        self._lost_at = self._refusal = None
        self._tell()

    def on_refused(self, refused: RequestRefused) -> None:
        assert self._connection is not None  # noqa: S101
        error = from_refusal(refused)
        too_large = error.code is grpc.StatusCode.INVALID_ARGUMENT and error.field not in _OF_NO_REPLICA
        if too_large and self._accepted:
            error = unavailable(f"no scheduler is connected that can go on with it: {error.message}")
        if error.code in RETRYABLE or too_large:
            if error.code in RETRYABLE or self._refusal is None:
                self._refusal = error
            self._refusers.add(self._connection)
            if self._accepted and self._lost_at is None:
                self._lost_at = time.monotonic()
        else:
            self._error = error
        self._connection = None
        self._tell()

    def on_token(self, output_index: int, token_id: int) -> None:
        if output_index >= self._request.n or self._finished[output_index]:
            return
        self._observe(output_index, 1)
        self._token_ids[output_index].append(token_id)
        if pending := self._pending.get(output_index):
            pending.token_ids.append(token_id)
        else:
            self._pending[output_index] = SequenceOutput(output_index=output_index, token_ids=[token_id])
        self._tell()

    def on_output(self, output: SequenceOutput) -> None:
        index = output.output_index
        if self.prompt_logprobs is not None and output.prompt_logprobs:
            self.prompt_logprobs.positions.extend(output.prompt_logprobs)
            output.ClearField("prompt_logprobs")
            self._tell()
            if not output.token_ids:
                return
        if index >= self._request.n or self._finished[index]:
            return
        self.cached_tokens = max(self.cached_tokens, output.cached_tokens)
        self._observe(index, len(output.token_ids))
        self._token_ids[index].extend(output.token_ids)
        self._finished[index] = output.finish_reason != 0
        if pending := self._pending.get(index):
            pending.token_ids.extend(output.token_ids)
            pending.logprobs.extend(output.logprobs)
            pending.finish_reason = output.finish_reason
            if output.HasField("score"):
                pending.score = output.score
        else:
            self._pending[index] = output
        if all(self._finished) and self._connection is not None:
            self._connection.forget(self._key)
            self._connection = None
        self._tell()

    def on_lost(self) -> None:
        self._connection = None
        self._refusal = None
        if self._lost_at is None:
            self._lost_at = time.monotonic()
        self._tell()

    @property
    def _lacks_prompt_logprobs(self) -> bool:
        logprobs = self.prompt_logprobs
        return logprobs is not None and len(logprobs.positions) < len(self._request.prompt_token_ids)

    def _request_prompt_logprobs(self) -> int | None:
        """What an attempt is to be asked for: all of them again, unless they are whole."""
        if self.prompt_logprobs is None or not self._lacks_prompt_logprobs:
            return None
        del self.prompt_logprobs.positions[1:]
        return self._request.prompt_logprobs

    async def _advance(self) -> None:
        if self._error is None and self._connection is None:
            await self._submit()
        if not self._has_news:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        self._has_news = False
        if self._error is not None:
            raise self._error

    def _tell(self) -> None:
        """Something arrived."""
        self._has_news = True
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def _submit(self) -> None:
        connection = await self._find()
        if self._lost_at is not None:
            metrics.RESUBMITS.inc()
            self._on_resubmit()
        elif self._refusers:
            metrics.RETRIES.inc()
        attempt = self._replicas.next_attempt()
        self._connection, self._key = connection, (self._request.request_id, attempt)
        connection.submit(self._message(attempt), self)

    @cached_property
    def _hashes(self) -> Sequence[bytes]:
        """Of the prompt, for `Replicas.choose`; apart from those who share no blocks with it."""
        salt = f"{self._tenant.id}\0{self._request.cache_salt}"
        return block_hashes(self._request.prompt_token_ids, salt)

    async def _find(self) -> Connection:
        while True:
            candidates = [c for c in self._replicas.available if c not in self._refusers]
            same_model = [c for c in candidates if self.model_revision in ("", c.welcome.model_revision)]
            if same_model:
                return self._replicas.choose(same_model, lambda: self._hashes)
            if candidates and not self._replicas.may_serve(self.model_revision):
                served = candidates[0].welcome.model_revision
                raise RequestError(
                    grpc.StatusCode.FAILED_PRECONDITION,
                    f"the request began on model revision {self.model_revision!r} and {served!r} is served "
                    "now; start it anew",
                    reason="MODEL_CHANGED",
                    field="spec.model_revision",
                )
            await self._wait_for_replica()

    async def _wait_for_replica(self) -> None:
        if self._replicas.closed:
            message = "this router is shutting down; resume with prior_outputs (gRPC), or ask anew (HTTP)"
            raise unavailable(message, "SHUTTING_DOWN")
        overloaded = self._refusal and self._refusal.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        if self._lost_at is None or overloaded:
            raise self._last_refusal()
        try:
            async with asyncio.timeout(self._lost_at + self._reconnect_timeout - time.monotonic()):
                await self._replicas.wait_change()
        except TimeoutError:
            raise self._last_refusal() from None

    def _last_refusal(self) -> RequestError:
        if self._refusal:
            return self._refusal
        of_model = f" that serves model revision {self.model_revision!r}" if self._replicas.available else ""
        return unavailable("no scheduler is connected" + of_model)

    def _message(self, attempt: int) -> Submit:
        request = self._request
        submit = Submit(
            key=RequestKey(request_id=request.request_id, attempt=attempt),
            prompt_token_ids=request.prompt_token_ids,
            sampling=request.sampling,
            max_tokens=request.max_tokens,
            min_tokens=request.min_tokens,
            stop_token_ids=sorted(request.stop_token_ids),
            n=request.n,
            beam_search=request.beam_search,
            constraint=request.constraint,
            priority=request.priority,
            cache_salt=request.cache_salt,
            tenant=self._tenant.id,
            # What was accepted once goes on wherever it can.
            max_tenant_requests=0 if self._accepted else self._tenant.max_concurrent_requests,
            trace_context=self._trace_context,
            age=_duration(time.monotonic() - self._arrival),
            model_revision=self.model_revision,
            prompt_logprobs=self._request_prompt_logprobs(),
        )
        if self._deadline is not None:
            submit.deadline_remaining.CopyFrom(_duration(self._deadline - time.monotonic()))
        # An accepted request is exempt from the queue bound even before its first token.
        if self._accepted or request.prior_outputs:
            submit.prior_outputs.extend(
                PriorOutput(index=index, token_ids=token_ids, finished=finished)
                for index, (token_ids, finished) in enumerate(
                    zip(self._token_ids, self._finished, strict=True)
                )
            )
        return submit

    def _observe(self, index: int, count: int) -> None:
        if not count:
            return
        now = time.monotonic()
        metrics.OUTPUT_TOKENS.inc(count)
        self._tenant.use_tokens(count)
        if last := self._last_arrival[index]:
            metrics.INTER_TOKEN_LATENCY.observe((now - last) / count)
        else:
            metrics.TIME_TO_FIRST_TOKEN.observe(now - self._arrival)
        self._last_arrival[index] = now


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(max(0, int(seconds * 1e9)))
    return duration
