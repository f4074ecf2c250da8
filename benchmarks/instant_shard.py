"""A shard that answers at once, for measuring what is around it."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

from common.version import PROTOCOL_VERSION
from pagoda.shard.v1.shard_pb2 import (
    ConfigureRequest,
    ConfigureResponse,
    DescribeResponse,
    ExecuteRequest,
    ExecuteResponse,
    Sampled,
)
from pagoda.v1.inference_pb2 import Constraint, PriorOutput

VOCAB_SIZE = 32_000


class InstantStream:
    """Answers each command once `may_answer` lets it; counts the seconds that its own work takes."""

    def __init__(self, vocab_size: int = VOCAB_SIZE) -> None:
        self._vocab_size = vocab_size
        self.answered = 0
        self.busy_s = 0.0
        self.sampled = 0
        # Tokens, over all steps.
        self.computed = 0
        # By the reader of the outputs, once per step, so that steps never merge.
        self.may_answer = asyncio.Semaphore(1)
        self._commands: asyncio.Queue[ExecuteRequest] = asyncio.Queue()
        self._uncomputed: dict[int, int] = {}

    async def send(self, command: ExecuteRequest) -> None:
        """Queues a command."""
        self._commands.put_nowait(command)

    async def results(self) -> AsyncIterator[ExecuteResponse]:
        """One result per command, in order."""
        while True:
            command = await self._commands.get()
            await self.may_answer.acquire()
            started = time.thread_time()
            response = self._execute(command)
            self.answered += 1
            self.busy_s += time.thread_time() - started
            yield response

    async def close(self) -> None:
        """Nothing to close."""

    def _execute(self, command: ExecuteRequest) -> ExecuteResponse:
        for join in command.joins:
            self._uncomputed[join.slot] = len(join.token_ids) - join.computed_length
        response = ExecuteResponse(epoch=command.epoch, step=command.step)
        for scheduled in command.scheduled:
            self.computed += scheduled.num_tokens
            self._uncomputed[scheduled.slot] -= scheduled.num_tokens
            if not self._uncomputed[scheduled.slot]:
                self._uncomputed[scheduled.slot] = 1
                token_id = (command.step * 7919 + scheduled.slot) % self._vocab_size
                response.sampled.append(Sampled(slot=scheduled.slot, token_id=token_id))
        self.sampled = len(response.sampled)
        if not self.sampled:
            # Nothing for the reader to see.
            self.may_answer.release()
        return response


class InstantShard:
    """Holds `num_blocks` blocks of `block_size` tokens and one stream."""

    def __init__(self, num_blocks: int, block_size: int, vocab_size: int = VOCAB_SIZE) -> None:
        self._capacity = num_blocks * block_size
        self._vocab_size = vocab_size
        self.stream = InstantStream(vocab_size)

    async def describe(self) -> DescribeResponse:
        """One byte per token, so that bytes are tokens."""
        return DescribeResponse(
            protocol_version=PROTOCOL_VERSION,
            model_revision="none",
            device="cuda",
            vocab_size=self._vocab_size,
            max_model_len=8192,
            kv_bytes_per_token=1,
            kv_capacity_bytes=self._capacity,
        )

    async def configure(self, request: ConfigureRequest) -> ConfigureResponse:
        """Takes any epoch."""
        return ConfigureResponse(epoch=request.epoch)

    async def prepare_constraint(
        self, constraint: Constraint, prior_outputs: Sequence[PriorOutput] = ()
    ) -> None:
        """Takes any."""

    def execute(self) -> InstantStream:
        """The only stream."""
        return self.stream

    async def close(self) -> None:
        """Nothing to close."""
