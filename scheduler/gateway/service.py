"""vllm.grpc.engine.VllmEngine: the protocol in which an SMG gateway drives an engine.

Served are generating, aborting, health, load, and what a gateway asks of a model; the other methods of the
protocol are UNIMPLEMENTED.
"""

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto.generated.common_pb2 import (
    FlushCacheRequest,
    FlushCacheResponse,
    GetTokenizerChunk,
    GetTokenizerRequest,
)

from common.probes import Probes
from common.rpc import abort, failure_code
from pagoda.scheduler.v1.scheduler_pb2 import Abort, RequestKey, RequestRefused
from scheduler.admission import RefusedError
from scheduler.engine import Engine
from scheduler.gateway.answer import Answer
from scheduler.gateway.model import ServedModel
from scheduler.gateway.submission import make_submit
from scheduler.limits import Limits
from scheduler.outbox import Outbox

SERVICE: Final = "vllm.grpc.engine.VllmEngine"
_ARCHIVE_CHUNK_BYTES: Final = 1 << 18

Context = Any  # grpc.aio.ServicerContext; its stubs lack what is used here


class GatewayService:
    """Submits a gateway's requests to the engine, each with an outbox of its own."""

    def __init__(self, engine: Engine, probes: Probes, model: ServedModel) -> None:
        self._engine = engine
        self._probes = probes
        self._model = model
        self._started = time.monotonic()
        # By request id.
        self._outboxes: dict[str, Outbox] = {}

    def rpc_handler(self) -> "grpc.GenericRpcHandler[Any, Any]":
        """The methods that are served."""
        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        served = {
            "Generate": (stream, self._generate, pb.GenerateRequest, pb.GenerateResponse),
            "Abort": (unary, self._abort, pb.AbortRequest, pb.AbortResponse),
            "HealthCheck": (unary, self._health_check, pb.HealthCheckRequest, pb.HealthCheckResponse),
            "GetLoads": (unary, self._get_loads, pb.GetLoadsRequest, pb.GetLoadsResponse),
            "GetModelInfo": (unary, self._get_model_info, pb.GetModelInfoRequest, pb.GetModelInfoResponse),
            "GetServerInfo": (
                unary,
                self._get_server_info,
                pb.GetServerInfoRequest,
                pb.GetServerInfoResponse,
            ),
            "GetTokenizer": (stream, self._get_tokenizer, GetTokenizerRequest, GetTokenizerChunk),
            "FlushCache": (unary, self._flush_cache, FlushCacheRequest, FlushCacheResponse),
        }
        methods = {
            name: kind(_refusing(method, request), None, response.SerializeToString)
            for name, (kind, method, request, response) in served.items()
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    def close(self) -> None:
        """Ends every call; the gateway may try again on another replica."""
        for name in self._outboxes:
            self._end(name, grpc.StatusCode.UNAVAILABLE, "the replica is shutting down")

    async def _generate(self, request: Any, context: Context) -> None:
        submit = make_submit(request, self._model.tokenizer.eos_token_ids, self._limits())
        name, outbox = submit.key.request_id, Outbox()
        if (remaining := context.time_remaining()) is not None:
            submit.deadline_remaining.FromNanoseconds(max(0, int(remaining * 1e9)))

        def end_output(index: int) -> None:
            self._engine.abort(outbox, Abort(key=submit.key, output_index=index))

        answer = Answer(request, submit.n, self._model.tokenizer.detokenizer, end_output)
        if self._outboxes.setdefault(name, outbox) is not outbox:
            raise RefusedError(grpc.StatusCode.ALREADY_EXISTS, f"request {name!r} is here already")
        try:
            self._engine.submit(outbox, submit)
            while not answer.finished:
                if outbox.overflowing:
                    raise RefusedError(grpc.StatusCode.RESOURCE_EXHAUSTED, "the gateway reads too slowly")
                for message in await outbox.take():
                    if message.HasField("refused"):
                        raise _error(message.refused)
                    for response in answer.take(message.outputs):
                        await context.write(response)
        finally:
            # However it ends, and whoever went away: the blocks are free before the next step.
            del self._outboxes[name]
            self._engine.abort(outbox, Abort(key=submit.key))

    def _limits(self) -> Limits:
        """Of what is served.

        Raises:
            RefusedError: no shard has been there yet.
        """
        if not self._engine.scheduler:
            raise RefusedError(grpc.StatusCode.UNAVAILABLE, "the replica is starting")
        return self._engine.scheduler.limits

    def _end(self, name: str, code: grpc.StatusCode, message: str) -> None:
        key = RequestKey(request_id=name)
        self._engine.abort(self._outboxes[name], Abort(key=key))
        self._outboxes[name].refuse(RequestRefused(key=key, code=code.value[0], message=message))

    async def _abort(self, request: Any, context: Context) -> Any:
        for name in self._outboxes.keys() & set(request.request_ids):
            self._end(name, grpc.StatusCode.CANCELLED, "aborted by the gateway")
        return pb.AbortResponse()

    async def _health_check(self, request: Any, context: Context) -> Any:
        ready = self._probes.ready
        return pb.HealthCheckResponse(healthy=ready, message="" if ready else "no shard, or draining")

    async def _get_loads(self, request: Any, context: Context) -> Any:
        limits, load = self._limits(), self._engine.load()
        used = load.total_blocks - load.free_blocks
        of_this = pb.SchedulerLoad(
            num_running_reqs=load.running,
            num_waiting_reqs=load.waiting,
            num_total_reqs=load.running + load.waiting,
            num_used_tokens=used * limits.block_size,
            max_total_num_tokens=load.total_blocks * limits.block_size,
            token_usage=used / load.total_blocks,
            max_running_requests=limits.max_num_seqs,
        )
        now = datetime.now(UTC).isoformat()
        return pb.GetLoadsResponse(timestamp=now, dp_rank_count=1, loads=[of_this])

    async def _get_model_info(self, request: Any, context: Context) -> Any:
        limits, model = self._limits(), self._model
        return pb.GetModelInfoResponse(
            model_path=str(model.folder),
            tokenizer_path=str(model.folder),
            served_model_name=model.name,
            is_generation=True,
            max_context_length=limits.max_model_len,
            max_req_input_len=limits.max_model_len,
            vocab_size=limits.vocab_size,
            model_type=model.model_type,
            architectures=model.architectures,
            eos_token_ids=model.tokenizer.eos_token_ids,
        )

    async def _get_server_info(self, request: Any, context: Context) -> Any:
        limits, load = self._limits(), self._engine.load()
        return pb.GetServerInfoResponse(
            server_type="vllm-grpc",
            active_requests=load.running + load.waiting,
            uptime_seconds=time.monotonic() - self._started,
            data_parallel_size=1,
            block_size=limits.block_size,
            max_num_seqs=limits.max_num_seqs,
            model_dtype=self._engine.description.dtype,
            kv_cache_dtype="auto",
        )

    async def _get_tokenizer(self, request: Any, context: Context) -> None:
        archive = await asyncio.to_thread(self._model.tokenizer_archive)
        for start in range(0, len(archive), _ARCHIVE_CHUNK_BYTES):
            data = archive[start : start + _ARCHIVE_CHUNK_BYTES]
            last = start + len(data) == len(archive)
            sha256 = hashlib.sha256(archive).hexdigest() if last else ""
            await context.write(GetTokenizerChunk(data=data, sha256=sha256))

    async def _flush_cache(self, request: Any, context: Context) -> Any:
        freed = self._engine.flush_prefix_cache()
        return FlushCacheResponse(success=True, message=f"{freed} blocks are free now")


def _refusing(method: Callable[[Any, Context], Awaitable[Any]], request_type: Any) -> Any:
    """`method`, with parsing before it, and its refusals as statuses after it.

    It takes bytes: grpc.aio would answer broken protobuf with UNKNOWN.
    """

    async def call(data: bytes, context: Context) -> Any:
        try:
            return await method(_parse(request_type, data), context)
        except RefusedError as refused:
            field = refused.field.rpartition("spec.")[2]
            code, details = refused.code, f"{field}: {refused}" if field else str(refused)
        await abort(context, code, details)
        return None

    return call


def _parse(request_type: Any, data: bytes) -> Any:
    try:
        return request_type.FromString(data)
    except DecodeError as error:
        message = f"the request isn't a {request_type.DESCRIPTOR.full_name}: {error}"
        raise RefusedError(grpc.StatusCode.INVALID_ARGUMENT, message) from error


def _error(refused: RequestRefused) -> RefusedError:
    return RefusedError(failure_code(refused.code), refused.message, refused.field)
