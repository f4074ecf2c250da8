"""The real scheduler in virtual time, against a shard that is nothing but a cost model."""

from collections import deque
from dataclasses import dataclass, field
from typing import cast

from benchmarks.arrivals import ArrivalQueue
from benchmarks.cost_model import CostModel
from benchmarks.measurements import Measurements
from benchmarks.traces import Trace
from pagoda.scheduler.v1.scheduler_pb2 import RequestKey, Submit
from pagoda.shard.v1.shard_pb2 import ExecuteResponse, Sampled
from pagoda.v1.sampling_pb2 import SamplingParams
from scheduler.admission import make_request
from scheduler.limits import Limits
from scheduler.outbox import Outbox
from scheduler.request import Request, Sequence
from scheduler.scheduler import Scheduler
from scheduler.step_plan import StepPlan
from scheduler.totals import Totals

STEPS_IN_FLIGHT = 2


@dataclass
class _Live:
    """A request under way, and the virtual second at which each of its sequences had its last token."""

    index: int
    arrival_s: float
    unfinished: int
    sampled: Sampled
    last_token_s: dict[Sequence, float] = field(default_factory=dict)


@dataclass
class _Results:
    """Stands for an `ExecuteResponse`; one `Sampled` serves all tokens of a request."""

    sampled: list[Sampled]
    prompt_logprobs: tuple[()] = ()


class PagedServer:
    """One replica, with two steps in flight as the engine has them.

    Waste changes slowly, and counting it costs as much as planning; so not every step is counted.
    """

    def __init__(self, limits: Limits, cost: CostModel, steps_per_waste_sample: int = 16) -> None:
        self.limits = limits
        self.scheduler = Scheduler(limits)
        self._cost = cost
        self._steps_per_waste_sample = steps_per_waste_sample
        self._outbox = Outbox()
        self._sampling = SamplingParams(temperature=1, top_p=1, repetition_penalty=1)
        self._live: dict[Request, _Live] = {}

    @property
    def totals(self) -> Totals:
        """What the scheduler counted."""
        return self.scheduler.totals

    def run(self, trace: Trace) -> Measurements:
        """Serves the trace to its end."""
        measured = Measurements()
        arrivals = ArrivalQueue(trace)
        in_flight: deque[tuple[StepPlan, float]] = deque()
        now = shard_free_s = 0.0
        while True:
            for arrival, index in arrivals.until(now):
                self._submit(trace, index, arrival)
            while len(in_flight) < STEPS_IN_FLIGHT and (plan := self.scheduler.plan()):
                shard_free_s = max(now, shard_free_s) + self._step_s(plan)
                in_flight.append((plan, shard_free_s))
                self._observe(plan, measured)
            if in_flight:
                plan, now = in_flight.popleft()
                self._receive(plan, now, trace, arrivals, measured)
            elif (next_s := arrivals.next_s) is not None:
                now = max(now, next_s)
            else:
                return measured

    def _submit(self, trace: Trace, index: int, arrival: float) -> None:
        asked = trace[index]
        submit = Submit(
            key=RequestKey(request_id=str(index), attempt=1),
            prompt_token_ids=asked.token_ids,
            max_tokens=asked.output_length,
            n=asked.n,
            sampling=self._sampling,
        )
        request = make_request(submit, self._outbox, self.limits, "", (arrival, index))
        self._live[request] = _Live(index, arrival, asked.n, Sampled(token_id=asked.output_id))
        self.scheduler.add(request)

    def _step_s(self, plan: StepPlan) -> float:
        kv_tokens = sum(sequence.num_computed for sequence, _ in plan.scheduled)
        swapped_blocks = len(plan.command.swap_outs) + len(plan.command.swap_ins)
        return self._cost.step_s(plan.num_tokens, kv_tokens, swapped_blocks * self.limits.block_size)

    def _observe(self, plan: StepPlan, measured: Measurements) -> None:
        measured.steps += 1
        measured.sequence_steps += len(plan.scheduled)
        if measured.steps % self._steps_per_waste_sample == 0:
            blocks, running = self.scheduler.blocks, self.scheduler.running
            allocated = blocks.device.num_used * blocks.block_size
            measured.hold(allocated, round(blocks.waste_ratio(running) * allocated))

    def _receive(
        self, plan: StepPlan, now: float, trace: Trace, arrivals: ArrivalQueue, measured: Measurements
    ) -> None:
        results = _Results([self._live[sequence.request].sampled for sequence in plan.sampling])
        gaps: dict[float, int] = {}
        for result in self.scheduler.process(plan, cast(ExecuteResponse, results)):
            sequence = result.sequence
            live = self._live[sequence.request]
            last = live.last_token_s.get(sequence)
            if last is None:
                measured.ttft.add(now - live.arrival_s)
            else:
                gaps[last] = gaps.get(last, 0) + 1
            live.last_token_s[sequence] = now
            live.unfinished -= bool(result.finish_reason)
            if not live.unfinished:
                del self._live[sequence.request]
                measured.finish(live.index, trace[live.index], live.arrival_s, now)
                arrivals.finished(live.index, now)
        for last, count in gaps.items():
            measured.itl.add(now - last, count)
