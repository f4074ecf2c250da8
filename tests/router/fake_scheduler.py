"""A scheduler that does what a test tells it, step by step."""

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import grpc

from common.rpc import bind
from common.tls import ServerTls
from pagoda.scheduler.v1 import scheduler_pb2 as pb
from pagoda.scheduler.v1 import scheduler_pb2_grpc
from pagoda.v1.inference_pb2 import FinishReason
from pagoda.v1.sampling_pb2 import PositionLogprobs

STOP = FinishReason.FINISH_REASON_STOP
LENGTH = FinishReason.FINISH_REASON_LENGTH


class FakeScheduler(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Records submits and aborts; answers only by the methods below."""

    def __init__(self, **welcome: Any) -> None:
        values: dict[str, Any] = {
            "protocol_version": 1,
            "model_revision": "r1",
            "max_model_len": 512,
            "vocab_size": 420,
        }
        self.block_map = pb.GetBlockMapResponse()
        self.welcome = pb.Welcome(**(values | {"dtype": "float32"} | welcome))
        self.hellos: asyncio.Queue[pb.Hello] = asyncio.Queue()
        self.submits: asyncio.Queue[pb.Submit] = asyncio.Queue()
        self.aborts: asyncio.Queue[pb.Abort] = asyncio.Queue()
        self._outbox: asyncio.Queue[pb.ServeResponse | None] = asyncio.Queue()
        self._numbers = itertools.count(1000)
        self._server: grpc.aio.Server | None = None
        self.address = ""

    async def start(self, address: str = "127.0.0.1:0", tls: ServerTls | None = None) -> None:
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(self, self._server)
        port = bind(self._server, address, tls)
        self.address = address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}"
        await self._server.start()

    async def stop(self) -> None:
        """Dies: streams break."""
        assert self._server is not None
        await self._server.stop(0)

    async def Serve(self, requests: Any, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        outbox = self._outbox = asyncio.Queue()
        reader = asyncio.create_task(self._read(requests))
        try:
            while (message := await outbox.get()) is not None:
                await context.write(message)
        finally:
            reader.cancel()

    async def _read(self, requests: Any) -> None:
        async for request in requests:
            match request.WhichOneof("message"):
                case "hello":
                    self._outbox.put_nowait(pb.ServeResponse(welcome=self.welcome))
                    self.hellos.put_nowait(request.hello)
                case "submit":
                    self.submits.put_nowait(request.submit)
                case "abort":
                    self.aborts.put_nowait(request.abort)

    async def accept(self, number: int | None = None) -> pb.Submit:
        """Takes the next submit and accepts it, under a number of its own."""
        submit = await self.submits.get()
        accepted = pb.RequestAccepted(
            key=submit.key, number=next(self._numbers) if number is None else number
        )
        self._outbox.put_nowait(pb.ServeResponse(accepted=accepted))
        return submit

    async def refuse(self, code: grpc.StatusCode, message: str, **fields: Any) -> pb.Submit:
        """Takes the next submit and refuses it."""
        submit = await self.submits.get()
        self.refuse_key(submit, code, message, **fields)
        return submit

    def refuse_key(self, submit: pb.Submit, code: grpc.StatusCode, message: str, **fields: Any) -> None:
        """Refuses a request, or hands back an accepted one."""
        refused = pb.RequestRefused(key=submit.key, code=code.value[0], message=message, **fields)
        self._outbox.put_nowait(pb.ServeResponse(refused=refused))

    def send(
        self,
        submit: pb.Submit,
        token_ids: Sequence[int],
        finish: FinishReason.ValueType = FinishReason.FINISH_REASON_UNSPECIFIED,
        *,
        logprobs: Sequence[PositionLogprobs] = (),
        cached_tokens: int = 0,
        outstanding_tokens: int = 0,
        output_index: int = 0,
        score: float | None = None,
        prompt_logprobs: Sequence[PositionLogprobs] = (),
    ) -> None:
        """One step's output for one request."""
        sequence = pb.SequenceOutput(
            key=submit.key,
            token_ids=token_ids,
            finish_reason=finish,
            logprobs=logprobs,
            cached_tokens=cached_tokens,
            output_index=output_index,
            score=score,
            prompt_logprobs=prompt_logprobs,
        )
        load = pb.Load(outstanding_tokens=outstanding_tokens)
        self._outbox.put_nowait(pb.ServeResponse(outputs=pb.StepOutputs(sequences=[sequence], load=load)))

    def send_plain(self, number: int, output_index: int, token_ids: Sequence[int]) -> None:
        """Plain tokens of the request that was accepted under this number."""
        handles = [number << 8 | output_index] * len(token_ids)
        outputs = pb.StepOutputs(handles=handles, token_ids=token_ids)
        self._outbox.put_nowait(pb.ServeResponse(outputs=outputs))

    async def FlushPrefixCache(  # noqa: N802
        self, request: pb.FlushPrefixCacheRequest, context: Any
    ) -> pb.FlushPrefixCacheResponse:
        return pb.FlushPrefixCacheResponse()

    async def GetBlockMap(  # noqa: N802
        self, request: pb.GetBlockMapRequest, context: Any
    ) -> pb.GetBlockMapResponse:
        return self.block_map

    def drain(self) -> None:
        self._outbox.put_nowait(pb.ServeResponse(draining=pb.Draining()))

    def drop(self) -> None:
        """Ends the stream; the router may come back."""
        self._outbox.put_nowait(None)
