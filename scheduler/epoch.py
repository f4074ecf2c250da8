"""One step stream to the shard: what is in flight on it, and since when."""

import asyncio
import math
import time
from collections import deque
from typing import Final

from pagoda.shard.v1.shard_pb2 import ExecuteResponse
from scheduler import metrics
from scheduler.pace import Pace
from scheduler.shard_client import ShardError, StepStream
from scheduler.step_plan import StepPlan

STEPS_IN_FLIGHT: Final = 2


class Epoch:
    """From a shard's configuration to its loss."""

    def __init__(self, number: int, stream: StepStream, wake: asyncio.Event) -> None:
        """`number` is the epoch's; `wake` is set whenever there is something to take."""
        self._number = number
        self._stream = stream
        self._wake = wake
        self._next_step = 0
        # Each with when it was sent, the oldest first.
        self._in_flight: deque[tuple[StepPlan, float]] = deque()
        self._results: deque[ExecuteResponse] = deque()
        # When the oldest step in flight had the shard to itself.
        self._oldest_since = 0.0
        self._pace = Pace()
        self._failure: ShardError | None = None

    @property
    def in_flight(self) -> list[StepPlan]:
        """What was sent and gave no result yet, the oldest first."""
        return [plan for plan, _ in self._in_flight]

    async def receive(self) -> None:
        """Keeps the results that come, until the stream breaks."""
        try:
            async for response in self._stream.results():
                self._results.append(response)
                self._wake.set()
        except ShardError as error:
            self._failure = error
            self._wake.set()

    def hold_s(self) -> float:
        """Seconds until a step may be sent; infinite while no more may be in flight."""
        if not self._in_flight:
            return 0.0
        if len(self._in_flight) == STEPS_IN_FLIGHT:
            return math.inf
        return self._pace.hold_s(time.monotonic() - self._oldest_since)

    async def send(self, plan: StepPlan) -> None:
        """Numbers the plan's command and sends it."""
        plan.command.epoch, plan.command.step = self._number, self._next_step
        self._next_step += 1
        now = time.monotonic()
        if not self._in_flight:
            self._oldest_since = now
        self._in_flight.append((plan, now))
        await self._stream.send(plan.command)

    def take(self) -> tuple[StepPlan, ExecuteResponse] | None:
        """The oldest step and its result, if that came.

        Raises:
            ShardError: the stream broke, or the result is not that step's.
        """
        if self._failure:
            raise self._failure
        if not self._results:
            return None
        response = self._results.popleft()
        if not self._in_flight:
            raise ShardError(f"a result of step {response.step} that is not in flight")
        plan, sent = self._in_flight[0]
        expected = (plan.command.epoch, plan.command.step, len(plan.sampling))
        if (response.epoch, response.step, len(response.sampled)) != expected:
            raise ShardError(f"a result of (epoch, step, tokens) other than the expected {expected}")
        self._in_flight.popleft()
        now = time.monotonic()
        metrics.observe_result(response, now - sent, now - self._oldest_since)
        self._pace.observe(now - self._oldest_since)
        self._oldest_since = now
        return plan, response

    def check_time(self, limit_s: float) -> None:
        """Raises ShardError if the oldest step takes longer than `limit_s` seconds."""
        waited = time.monotonic() - self._oldest_since
        if self._in_flight and not self._results and waited > limit_s:
            raise ShardError(f"a step took longer than {limit_s:g} s")

    async def close(self) -> None:
        """Ends the stream."""
        await self._stream.close()
