"""The loop: receive, plan, send, take the last result; and the requests that it serves."""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, Final, TypeVar

import grpc

from common import logs
from common.metrics import set_model
from common.probes import Probes
from common.tracing import is_sampled, trace_id
from common.version import PROTOCOL_VERSION
from pagoda.scheduler.v1.scheduler_pb2 import Abort, Load, SequenceOutput, Submit
from pagoda.shard.v1.shard_pb2 import ConfigureRequest, DescribeResponse, ExecuteResponse, Sampled
from pagoda.v1.inference_pb2 import FinishReason
from scheduler import metrics
from scheduler.admission import RefusedError, make_request, seconds, submit_key
from scheduler.config import SchedulerConfig
from scheduler.epoch import Epoch
from scheduler.invariants import check
from scheduler.limits import FatalError, Limits, resolve
from scheduler.outbox import Outbox
from scheduler.preparations import Preparations
from scheduler.request import Request, Sequence, State
from scheduler.request_trace import RequestTrace
from scheduler.scheduler import Scheduler, SequenceResult
from scheduler.shard_client import (
    ConfigurationError,
    ConstraintRefusedError,
    ShardClient,
    ShardError,
)
from scheduler.step_plan import StepPlan

if TYPE_CHECKING:
    from common.otlp import Tracer

log = logging.getLogger(__name__)

T = TypeVar("T")

TICK_S: Final = 1.0
RETRY_DELAY_S: Final = 0.1


class Engine:
    """Owns the scheduler and its shard. All methods run on one event loop."""

    def __init__(
        self, config: SchedulerConfig, shard: ShardClient, probes: Probes, tracer: "Tracer | None" = None
    ) -> None:
        self.config = config
        self.scheduler: Scheduler | None = None
        self.description = DescribeResponse()
        self.ready = asyncio.Event()
        self._shard = shard
        self._probes = probes
        self._tracer = tracer
        self._requests: dict[tuple[Outbox, tuple[str, int]], Request] = {}
        # Requests by tenant, over all routers; those that have none are not kept.
        self._tenants: Counter[str] = Counter()
        self._deadlines: dict[Request, asyncio.TimerHandle] = {}
        self._preparations = Preparations(shard, self._refuse_constraint)
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._submitted = 0
        self._draining = False
        self._checked_step = 0

    # What routers ask for.

    def submit(self, outbox: Outbox, submit: Submit) -> None:
        """Queues a request; says through the outbox whether it was accepted: with a constraint, later."""
        try:
            request = self._make_request(outbox, submit)
        except RefusedError as refused:
            metrics.REFUSED.labels(refused.cause).inc()
            log.debug("refused: %s", refused.for_log(), extra=_about(submit))
            outbox.refuse(refused.to_proto(submit))
            return
        prepares = submit.HasField("constraint") and not request.finished
        if not prepares:
            self._accept(request)
        if request.finished:
            return
        if self._tracer and is_sampled(submit.trace_context):
            request.trace = RequestTrace(self._tracer, submit.trace_context)
        self._requests[outbox, request.key] = request
        self._tenants[submit.tenant] += 1
        self._idle.clear()
        assert self.scheduler  # noqa: S101
        self.scheduler.add(request)
        if prepares:
            self._preparations.begin(request, lambda: self._accept_prepared(request))
        if submit.HasField("deadline_remaining"):
            delay = seconds(submit.deadline_remaining)
            self._deadlines[request] = asyncio.get_running_loop().call_later(delay, self._expire, request)
        self._wake.set()

    def _accept(self, request: Request) -> None:
        metrics.ACCEPTED.inc()
        request.outbox.accept(request.submit.key, request.number)

    def _accept_prepared(self, request: Request) -> None:
        self._accept(request)
        self._wake.set()

    def _refuse_constraint(self, request: Request, error: ConstraintRefusedError) -> None:
        refused = RefusedError(grpc.StatusCode.INVALID_ARGUMENT, str(error), error.field)
        metrics.REFUSED.labels(refused.cause).inc()
        self._fail(request, refused)

    def _make_request(self, outbox: Outbox, submit: Submit) -> Request:
        scheduler, retry_delay = self.scheduler, 1.0
        if not scheduler or self._draining:
            cause = "draining" if self._draining else "starting"
            reason = f"the replica is {cause}"
            raise RefusedError(grpc.StatusCode.UNAVAILABLE, reason, cause=cause, retry_delay_s=retry_delay)
        if (outbox, submit_key(submit)) in self._requests:
            raise RefusedError(
                grpc.StatusCode.ALREADY_EXISTS,
                f"request {submit_key(submit)} is here already",
                cause="duplicate",
            )
        exhausted = grpc.StatusCode.RESOURCE_EXHAUSTED
        limit = self.config.max_waiting_requests
        if len(scheduler.waiting) >= limit and not submit.prior_outputs:
            message = f"requests that wait already: {len(scheduler.waiting)}; the limit is {limit}"
            raise RefusedError(exhausted, message, cause="queue_full", retry_delay_s=retry_delay)
        limit, here = submit.max_tenant_requests, self._tenants[submit.tenant]
        if limit and here >= limit:
            message = f"{here} requests of key {submit.tenant!r} are here already; its limit is {limit}"
            raise RefusedError(exhausted, message, cause="key_limit", retry_delay_s=retry_delay)
        self._submitted += 1
        arrival = (time.monotonic() - seconds(submit.age), self._submitted)
        return make_request(submit, outbox, scheduler.limits, self.description.model_revision, arrival)

    def abort(self, outbox: Outbox, abort: Abort) -> None:
        """Ends a request; its blocks are free when this returns. Unknown ones have ended by themselves."""
        one_output = abort.HasField("output_index")
        if request := self._requests.get((outbox, (abort.key.request_id, abort.key.attempt))):
            for sequence in list(request.sequences):
                # Beams come and go; they are ended together.
                if request.beams or abort.output_index == sequence.output_index or not one_output:
                    self._end_sequence(sequence, "abort")

    def detach(self, outbox: Outbox) -> None:
        """The router is gone: so are its requests."""
        for request in list(self._requests.values()):
            if request.outbox is outbox:
                self._end_request(request, "abort")

    def _end_request(self, request: Request, reason: str) -> None:
        for sequence in list(request.sequences):
            self._end_sequence(sequence, reason)

    def _end_sequence(self, sequence: Sequence, reason: str) -> None:
        assert self.scheduler  # noqa: S101
        if sequence.state is not State.FINISHED:
            self.scheduler.finish(sequence)
            metrics.FINISHED.labels(reason).inc()
        self._forget_if_finished(sequence.request)
        self._wake.set()

    def _fail(self, request: Request, refused: RefusedError) -> None:
        level = logging.ERROR if refused.code is grpc.StatusCode.INTERNAL else logging.DEBUG
        log.log(level, "failed: %s", refused.for_log(), extra=_about(request.submit))
        request.outbox.refuse(refused.to_proto(request.submit))
        self._end_request(request, "error")

    def _expire(self, request: Request) -> None:
        self._fail(request, RefusedError(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline passed"))

    def _forget_if_finished(self, request: Request) -> None:
        if not request.finished:
            return
        if self._requests.pop((request.outbox, request.key), None):
            self._tenants[request.submit.tenant] -= 1
            if not self._tenants[request.submit.tenant]:
                del self._tenants[request.submit.tenant]
            if request.trace:
                request.trace.end(
                    {"gen_ai.response.id": request.key[0], "gen_ai.usage.input_tokens": request.prompt_length}
                )
        self._preparations.forget(request)
        if timer := self._deadlines.pop(request, None):
            timer.cancel()
        if not self._requests:
            self._idle.set()

    # The loop.

    async def run(self) -> None:
        """Serves until cancelled. A lost shard costs a recompute, never a request.

        Raises:
            FatalError: the shard and the configuration don't fit together.
        """
        while True:
            epoch = await self._start_epoch()
            try:
                await self._serve(epoch)
            except ShardError as error:
                log.error("shard lost: %s; requests that wait for it: %d", error, len(self._requests))
                self._recover(epoch)
                await asyncio.sleep(RETRY_DELAY_S)
            finally:
                self._probes.ready = False
                metrics.SHARD_UP.set(0)
                await epoch.close()

    async def _start_epoch(self) -> Epoch:
        delay, reason = RETRY_DELAY_S, ""
        while True:
            self._probes.tick()
            try:
                description = await self._shard.describe()
                limits = resolve(self.config, description, self.scheduler.limits if self.scheduler else None)
                number = description.epoch + 1
                configuration = ConfigureRequest(
                    protocol_version=PROTOCOL_VERSION,
                    epoch=number,
                    num_blocks=limits.num_blocks,
                    block_size=limits.block_size,
                    max_num_seqs=limits.max_num_seqs,
                    max_num_batched_tokens=limits.max_num_batched_tokens,
                    max_model_len=limits.max_model_len,
                    num_host_blocks=limits.num_host_blocks,
                    rendezvous_address=description.rendezvous_address,
                )
                await self._ticking(self._shard.configure(configuration))
            except ConfigurationError as error:
                raise FatalError(f"the shard can't be configured like this: {error}") from error
            except ShardError as error:
                if str(error) != reason:
                    reason = str(error)
                    log.info("waiting for %s: %s", ", ".join(self.config.shard_addresses), reason)
                await asyncio.sleep(delay)
                delay = min(delay * 1.5, 1.0)
                continue
            self._adopt(description, limits)
            log.info("epoch %d: %d blocks of %d tokens", number, limits.num_blocks, limits.block_size)
            return Epoch(number, self._shard.execute(), self._wake)

    async def _ticking(self, slow: Coroutine[Any, Any, T]) -> T:
        """Awaits what may take minutes, such as a shard's warm-up, which is no stall of this process."""
        task = asyncio.ensure_future(slow)
        try:
            while not task.done():
                self._probes.tick()
                await asyncio.wait({task}, timeout=1.0)
            return task.result()
        finally:
            task.cancel()

    def _adopt(self, description: DescribeResponse, limits: Limits) -> None:
        if self.scheduler and (description.model_revision, limits) != (
            self.description.model_revision,
            self.scheduler.limits,
        ):
            raise FatalError("the shard came back with another model or size; restart the scheduler")
        self.description = description
        self.scheduler = self.scheduler or Scheduler(limits)
        self.ready.set()
        set_model(description.model_revision, description.dtype)
        metrics.SHARD_UP.set(1)
        self._probes.started = True
        self._probes.ready = not self._draining

    async def _serve(self, epoch: Epoch) -> None:
        receiver = asyncio.create_task(epoch.receive())
        try:
            while True:
                self._probes.tick()
                self._wake.clear()
                while taken := epoch.take():
                    self._process(*taken)
                while not (hold_s := epoch.hold_s()) and (plan := self._plan()):
                    await epoch.send(plan)
                await self._wait(epoch, min(hold_s or TICK_S, TICK_S))
        finally:
            receiver.cancel()
            with contextlib.suppress(asyncio.CancelledError, ShardError):
                await receiver

    async def _wait(self, epoch: Epoch, limit_s: float) -> None:
        """Until there is something to do, for at most `limit_s` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._wake.wait()
        if not self._requests and not epoch.in_flight:
            self._check_when_idle()
        epoch.check_time(self.config.step_timeout)

    def _check_when_idle(self) -> None:
        """Once per idle time. A miscount would be a fault of ours: start anew rather than serve from it."""
        assert self.scheduler  # noqa: S101
        if self._checked_step == self.scheduler.num_steps:
            return
        self._checked_step = self.scheduler.num_steps
        try:
            check(self.scheduler)
        except AssertionError as error:
            raise ShardError(f"the scheduler's books don't balance: {error}") from error

    def _plan(self) -> StepPlan | None:
        assert self.scheduler  # noqa: S101
        started = time.perf_counter()
        plan = self.scheduler.plan()
        if plan:
            metrics.observe_plan(plan, time.perf_counter() - started)
        return plan

    def _process(self, plan: StepPlan, response: ExecuteResponse) -> None:
        assert self.scheduler  # noqa: S101
        outputs = self.scheduler.process(plan, response)
        for output in outputs:
            self._deliver(output)
        load = self.load()
        for outbox in {output.sequence.request.outbox for output in outputs}:
            outbox.flush(load)

    def _deliver(self, output: SequenceResult) -> None:
        sequence, token_ids, finish_reason, sampled, score, prompt_logprobs = output
        if not (
            finish_reason or sequence.reports_cached or sampled is None or _is_more_than_a_token(sampled)
        ):
            outbox = sequence.request.outbox
            outbox.add_token(sequence.handle, token_ids[0], begins=sequence.begins)
            return
        request = sequence.request
        if sampled and sampled.invalid:
            reason = "the model's logits were not finite; the weights or the dtype don't suit this prompt"
            if request.submit.HasField("constraint"):
                reason = "no token is left that spec.constraint allows and the model gives a finite logit"
            self._fail(request, RefusedError(grpc.StatusCode.INTERNAL, reason))
            return
        message = SequenceOutput(
            key=request.submit.key,
            output_index=sequence.output_index,
            token_ids=token_ids,
            prompt_logprobs=prompt_logprobs,
        )
        if sequence.reports_cached:
            message.cached_tokens = sequence.cached_tokens or 0
            sequence.reports_cached = False
        if sampled and sampled.HasField("logprobs"):
            message.logprobs.append(sampled.logprobs)
        if finish_reason:
            message.finish_reason = finish_reason
        if score is not None:
            message.score = score
        request.outbox.add_output(sequence.handle, message, begins=sequence.begins)
        if finish_reason:
            name = FinishReason.Name(finish_reason).removeprefix("FINISH_REASON_").lower()
            metrics.FINISHED.labels(name).inc()
            self._forget_if_finished(request)

    def _recover(self, epoch: Epoch) -> None:
        assert self.scheduler  # noqa: S101
        metrics.SHARD_LOSSES.inc()
        self.scheduler.reset()
        for request in self._requests.values():
            if request.trace:
                request.trace.event("shard_lost")
        for request in self.scheduler.suspects.blame(epoch.in_flight):
            message = f"the step of this request failed {request.failed_steps} times, the last time alone"
            self._fail(request, RefusedError(grpc.StatusCode.INTERNAL, message))
        for request in self._requests.values():
            # The next shard may be a new one. So a join finds its grammar, and no step waits for a compile.
            if request.submit.HasField("constraint"):
                self._preparations.begin(request, self._wake.set)

    @property
    def block_bytes(self) -> int:
        """What a block takes, over all ranks."""
        return (
            self.description.kv_bytes_per_token * self.config.block_size * max(self.description.world_size, 1)
        )

    def load(self) -> Load:
        """How busy this replica is."""
        if not self.scheduler:
            return Load()
        return Load(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            outstanding_tokens=self.scheduler.outstanding_tokens,
            free_blocks=self.scheduler.blocks.device.num_available,
            total_blocks=self.scheduler.limits.num_blocks,
        )

    def flush_prefix_cache(self) -> int:
        """Forgets every cached prefix; returns how many blocks that freed."""
        if not self.scheduler:
            return 0
        device = self.scheduler.blocks.device
        freed = device.num_cached
        device.flush()
        return freed

    def stop_admitting(self) -> None:
        """From now on new requests are refused, for another replica to take."""
        self._draining = True
        self._probes.ready = False

    async def wait_idle(self) -> None:
        """Returns once every request has ended."""
        await self._idle.wait()


def _about(submit: Submit) -> dict[str, Any]:
    """What a log line says of the request that it is about."""
    return logs.fields(request_id=submit.key.request_id, trace_id=trace_id(submit.trace_context))


def _is_more_than_a_token(sampled: Sampled) -> bool:
    return sampled.invalid or sampled.HasField("logprobs")
