"""A real shard in the scheduler's process, and a way to generate without a router."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from common.probes import Probes
from common.version import PROTOCOL_VERSION
from pagoda.scheduler.v1.scheduler_pb2 import RequestKey, RequestRefused, Submit
from pagoda.shard.v1.shard_pb2 import (
    ConfigureRequest,
    ConfigureResponse,
    DescribeResponse,
    ExecuteRequest,
    ExecuteResponse,
)
from pagoda.v1.inference_pb2 import BeamSearch, Constraint, PriorOutput
from pagoda.v1.sampling_pb2 import PositionLogprobs, SamplingParams
from scheduler.config import SchedulerConfig
from scheduler.engine import Engine
from scheduler.invariants import check
from scheduler.outbox import Outbox
from scheduler.shard_client import ConstraintRefusedError
from shard import kv_cache
from shard.constraints import ConstraintError, Grammars
from shard.decode_graphs import Capture
from shard.executor import StepExecutor
from shard.model_config import load_model_config
from shard.rope import max_context_len
from shard.weights import load_model
from tests.scheduler.reading import OutputReader


class InProcessStream:
    """Executes commands in order on one thread, as the shard's compute thread does."""

    def __init__(self, executor: StepExecutor) -> None:
        self._executor = executor
        self._thread = ThreadPoolExecutor(1)
        self._results: asyncio.Queue[asyncio.Future[ExecuteResponse]] = asyncio.Queue()

    async def send(self, command: ExecuteRequest) -> None:
        loop = asyncio.get_running_loop()
        self._results.put_nowait(loop.run_in_executor(self._thread, self._run, command))

    def _run(self, command: ExecuteRequest) -> ExecuteResponse:
        return self._executor.execute(command).to_proto()

    async def results(self) -> AsyncIterator[ExecuteResponse]:
        while True:
            yield await (await self._results.get())

    async def close(self) -> None:
        self._thread.shutdown()


class InProcessShard:
    """Loads a folder and stands in for a shard process, behind the scheduler's client interface."""

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype = torch.float32,
        start_capture: Callable[[], Capture] | None = None,
    ) -> None:
        config = load_model_config(folder)
        device = torch.device("cpu")
        longest = max_context_len(config)
        self._grammars = Grammars(folder / "tokenizer.json", config.vocab_size)
        model = load_model(folder, config, dtype, device, longest).prepare()
        self._executor = StepExecutor(model, dtype, device, start_capture, grammars=self._grammars)
        self._described = DescribeResponse(
            protocol_version=PROTOCOL_VERSION,
            model_revision="test",
            dtype=str(dtype),
            device="cpu",
            vocab_size=config.vocab_size,
            max_model_len=longest,
            kv_bytes_per_token=kv_cache.bytes_per_token(config, dtype),
            kv_capacity_bytes=kv_cache.GIB,
        )

    async def describe(self) -> DescribeResponse:
        description = DescribeResponse()
        description.CopyFrom(self._described)
        return description

    async def configure(self, request: ConfigureRequest) -> ConfigureResponse:
        self._described.epoch = request.epoch
        kept = await asyncio.to_thread(self._executor.configure, request)
        return ConfigureResponse(epoch=request.epoch, kept_allocation=kept)

    async def prepare_constraint(
        self, constraint: Constraint, prior_outputs: Sequence[PriorOutput] = ()
    ) -> None:
        try:
            await asyncio.to_thread(self._grammars.get, constraint)
        except ConstraintError as error:
            raise ConstraintRefusedError(str(error)) from error

    def execute(self) -> InProcessStream:
        return InProcessStream(self._executor)

    async def close(self) -> None:
        pass


@dataclass
class Generated:
    """What came of one request; the first three of its first output."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    refused: RequestRefused | None = None
    outputs: dict[int, list[int]] = field(default_factory=dict)
    scores: dict[int, float] = field(default_factory=dict)
    cached_tokens: int = 0
    prompt_logprobs: list[PositionLogprobs] = field(default_factory=list)


GREEDY = SamplingParams(temperature=0, top_p=1, repetition_penalty=1)


def request(
    name: str,
    prompt: Sequence[int],
    max_tokens: int,
    sampling: SamplingParams = GREEDY,
    stop: Sequence[int] = (),
    n: int = 1,
    beam_search: BeamSearch | None = None,
    **fields: Any,
) -> Submit:
    return Submit(
        key=RequestKey(request_id=name, attempt=1),
        prompt_token_ids=prompt,
        max_tokens=max_tokens,
        sampling=sampling,
        stop_token_ids=stop,
        n=n,
        beam_search=beam_search,
        **fields,
    )


@contextlib.asynccontextmanager
async def engine_on(shard: InProcessShard, **options: Any) -> AsyncIterator[Engine]:
    """A running engine; at the end every block is free."""
    engine = Engine(SchedulerConfig(shard_addresses=("in process",), **options), shard, Probes())
    running = asyncio.create_task(engine.run())
    waiting = asyncio.create_task(engine.ready.wait())
    await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
    if running.done():
        await running
    try:
        yield engine
        assert engine.scheduler
        check(engine.scheduler)
        assert engine.scheduler.blocks.device.num_used == 0
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


async def generate(engine: Engine, submits: Sequence[Submit]) -> dict[str, Generated]:
    """Submits all at once and collects until each has ended."""
    outbox = Outbox()
    results = {submit.key.request_id: Generated() for submit in submits}
    unfinished = {(submit.key.request_id, index) for submit in submits for index in range(submit.n)}
    reader = OutputReader()
    for submit in submits:
        engine.submit(outbox, submit)
    while unfinished:
        for message in await outbox.take():
            if message.HasField("refused"):
                results[message.refused.key.request_id].refused = message.refused
                unfinished -= {key for key in unfinished if key[0] == message.refused.key.request_id}
            for output in reader.read(message):
                result = results[output.key.request_id]
                result.prompt_logprobs += output.prompt_logprobs
                tokens = result.outputs.setdefault(output.output_index, [])
                tokens += output.token_ids
                if output.output_index == 0:
                    result.token_ids = tokens
                    result.logprobs += output.logprobs
                    result.cached_tokens = max(result.cached_tokens, output.cached_tokens)
                if output.HasField("score"):
                    result.scores[output.output_index] = output.score
                if output.finish_reason:
                    unfinished.discard((output.key.request_id, output.output_index))
    return results
