"""ShardService: the gRPC face of a StepExecutor.

Commands run on one compute thread, apart from gRPC's threads, in the order they arrive.
"""

import logging
import queue
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NoReturn

import grpc

from common.version import PROTOCOL_VERSION
from pagoda.shard.v1.shard_pb2 import (
    ConfigureRequest,
    ConfigureResponse,
    DescribeRequest,
    DescribeResponse,
    ExecuteRequest,
    ExecuteResponse,
    PrepareConstraintRequest,
    PrepareConstraintResponse,
)
from pagoda.shard.v1.shard_pb2_grpc import ShardServiceServicer
from shard import metrics
from shard.constraints import ConstraintError, Grammars
from shard.executor import StepError, StepExecutor
from shard.parallel import RankLostError, RankMismatchError, Rendezvous
from shard.results import StepResult

log = logging.getLogger(__name__)
# A request that was aborted leaves its compile to end by itself; the other gRPC threads stay free meanwhile.
MAX_PREPARING = 4


@dataclass(frozen=True)
class Loaded:
    """A model that is ready to be configured, and what `Describe` says of it."""

    executor: StepExecutor
    description: DescribeResponse
    grammars: Grammars
    rendezvous: Rendezvous | None = None
    """What rank 0 of several serves as long as this lives."""


class ShardService(ShardServiceServicer):
    """One model on one rank. `Describe` answers UNAVAILABLE until `loaded` is set."""

    def __init__(self) -> None:
        self.loaded: Loaded | None = None
        self.configured = threading.Event()
        self.load_state = "starting"
        self._instance_id = uuid.uuid4().hex
        self._compute = ThreadPoolExecutor(1, thread_name_prefix="compute")
        self._preparing = threading.Semaphore(MAX_PREPARING)
        self._lock = threading.Lock()
        self._epoch = 0
        self._streams = 0

    @property
    def streaming(self) -> bool:
        """Whether a scheduler holds an `Execute` stream."""
        return self._streams > 0

    def Describe(  # noqa: N802
        self, request: DescribeRequest, context: grpc.ServicerContext
    ) -> DescribeResponse:
        """What this shard holds and can hold."""
        loaded = self._loaded(context)
        response = DescribeResponse(epoch=self._epoch, instance_id=self._instance_id)
        response.MergeFrom(loaded.description)
        return response

    def Configure(  # noqa: N802
        self, request: ConfigureRequest, context: grpc.ServicerContext
    ) -> ConfigureResponse:
        """Starts an epoch; commands of older ones are refused from here on."""
        loaded = self._loaded(context)
        description = loaded.description
        if request.protocol_version != PROTOCOL_VERSION:
            message = f"the scheduler speaks protocol {request.protocol_version}, this shard "
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"{message}{PROTOCOL_VERSION}")
        for name in ("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            if not getattr(request, name):
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{name} is 0; it must be at least 1")
        if request.max_model_len > description.max_model_len:
            message = (
                f"max_model_len {request.max_model_len} is above the model's {description.max_model_len}"
            )
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, message)
        wanted = request.num_blocks * request.block_size * description.kv_bytes_per_token
        if wanted > description.kv_capacity_bytes:
            message = f"{request.num_blocks} blocks take {wanted} bytes; {description.kv_capacity_bytes} fit"
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, message)
        with self._lock:
            if request.epoch <= self._epoch:
                message = f"epoch {request.epoch} is not above {self._epoch}"
                context.abort(grpc.StatusCode.FAILED_PRECONDITION, message)
            self._epoch = request.epoch
        try:
            kept = self._compute.submit(loaded.executor.configure, request).result()
        except RankMismatchError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except RankLostError as error:
            log.warning("epoch %d can't begin: %s", request.epoch, error)
            _unavailable(context, str(error))
        except (RuntimeError, MemoryError) as error:
            log.exception("configure failed")
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{wanted} bytes of blocks: {error}")
        metrics.EPOCH.set(request.epoch)
        metrics.KV_BYTES.labels("device").set(wanted)
        host_bytes = request.num_host_blocks * request.block_size * description.kv_bytes_per_token
        metrics.KV_BYTES.labels("host").set(host_bytes)
        self.configured.set()
        return ConfigureResponse(epoch=request.epoch, kept_allocation=kept)

    def PrepareConstraint(  # noqa: N802
        self, request: PrepareConstraintRequest, context: grpc.ServicerContext
    ) -> PrepareConstraintResponse:
        """Compiles in this gRPC thread, which waits for a process; the compute thread goes on."""
        grammars = self._loaded(context).grammars
        if not self._preparing.acquire(blocking=False):
            _unavailable(context, f"{MAX_PREPARING} constraints are being compiled already")
        try:
            grammars.get(request.constraint)
            broken = (
                prior.index
                for prior in request.prior_outputs
                if not prior.finished and not grammars.allows(request.constraint, prior.token_ids)
            )
            return PrepareConstraintResponse(broken_output=next(broken, None))
        except ConstraintError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            self._preparing.release()

    def Execute(  # noqa: N802
        self, request_iterator: Iterator[ExecuteRequest], context: grpc.ServicerContext
    ) -> Iterator[ExecuteResponse]:
        """Runs commands as they come. When the stream ends, those not yet started are dropped."""
        self._loaded(context)
        results: queue.SimpleQueue[Future[StepResult] | None] = queue.SimpleQueue()
        ended = threading.Event()
        submitted: list[Future[StepResult]] = []

        def read() -> None:
            try:
                for command in request_iterator:
                    future = self._compute.submit(self._run, command, ended)
                    submitted[:] = [other for other in submitted if not other.done()] + [future]
                    results.put(future)
            except grpc.RpcError:
                log.info("the scheduler's stream broke")
            finally:
                results.put(None)

        with self._lock:
            self._streams += 1
            metrics.STREAMS.inc()
        reader = threading.Thread(target=read, name="execute-reader", daemon=True)
        reader.start()
        try:
            while (future := results.get()) is not None:
                yield self._response(future, context)
        finally:
            ended.set()
            for future in submitted:
                future.cancel()
            with self._lock:
                self._streams -= 1
                metrics.STREAMS.dec()

    def _run(self, command: ExecuteRequest, ended: threading.Event) -> StepResult:
        if ended.is_set() or command.epoch != self._epoch:
            raise StepError(
                f"epoch {command.epoch} has ended; the shard serves epoch {self._epoch}, for one scheduler"
            )
        assert self.loaded  # noqa: S101
        return self.loaded.executor.execute(command)

    def _response(self, future: Future[StepResult], context: grpc.ServicerContext) -> ExecuteResponse:
        try:
            result = future.result()
            response = result.to_proto()
        except StepError as error:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except CancelledError:
            context.abort(grpc.StatusCode.ABORTED, "the stream has ended")
        except RankLostError as error:
            metrics.FAILURES.inc()
            log.error("a step failed: %s", error)
            _unavailable(context, str(error))
        except Exception as error:
            metrics.FAILURES.inc()
            log.exception("a step failed")
            context.abort(grpc.StatusCode.INTERNAL, f"a step failed: {type(error).__name__}: {error}")
        metrics.TOKENS.inc(result.num_tokens)
        metrics.COMPUTE.observe(response.compute_seconds)
        metrics.SAMPLE.observe(response.sample_seconds)
        return response

    def _loaded(self, context: grpc.ServicerContext) -> Loaded:
        if not self.loaded:
            _unavailable(context, self.load_state)
        return self.loaded


def _unavailable(context: grpc.ServicerContext, reason: str) -> NoReturn:
    context.abort(grpc.StatusCode.UNAVAILABLE, reason)
    raise AssertionError("abort returned")
