"""The shard without processes around it: the step commands that the real scheduler gives, one by one."""

import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from benchmarks.paged import STEPS_IN_FLIGHT
from benchmarks.workload import Run, Work, output_tokens
from common.probes import Probes
from pagoda.scheduler.v1.scheduler_pb2 import RequestKey, Submit
from pagoda.shard.v1.shard_pb2 import ConfigureRequest, ExecuteRequest, ExecuteResponse, Sampled
from pagoda.v1.sampling_pb2 import SamplingParams
from scheduler.admission import make_request
from scheduler.limits import Limits
from scheduler.outbox import Outbox
from scheduler.scheduler import Scheduler
from scheduler.step_plan import StepPlan
from shard.config import ShardConfig
from shard.server import load_shard
from shard.service import ShardService

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Step:
    """A command, how many tokens it computes, and how many rows of logits."""

    command: ExecuteRequest
    num_tokens: int
    num_rows: int


@dataclass
class _Results:
    """Stands for an `ExecuteResponse`."""

    sampled: list[Sampled]
    prompt_logprobs: tuple[()] = ()


def limits_for(work: Work, vocab_size: int, device: str) -> Limits:
    """The scheduler's own defaults, and blocks enough for the work."""
    max_num_seqs, budget = (256, 4096) if device == "cuda" else (64, 256)
    lengths = sorted((len(request.prompt) + request.max_tokens for request in work), reverse=True)
    tokens = sum(lengths[:max_num_seqs]) + max_num_seqs * BLOCK_SIZE
    return Limits(
        num_blocks=tokens // BLOCK_SIZE * 102 // 100 + 8,
        block_size=BLOCK_SIZE,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=lengths[0] + 1,
        vocab_size=vocab_size,
    )


def record(work: Work, limits: Limits) -> list[Step]:
    """What the scheduler commands when all of `work` is there at once: no clock has a part in it."""
    scheduler = Scheduler(limits)
    sampling = SamplingParams(temperature=0, top_p=1, repetition_penalty=1)
    outbox = Outbox()
    for index, request in enumerate(work):
        submit = Submit(
            key=RequestKey(request_id=str(index), attempt=1),
            prompt_token_ids=request.prompt,
            max_tokens=request.max_tokens,
            n=1,
            sampling=sampling,
        )
        scheduler.add(make_request(submit, outbox, limits, "", (0.0, index)))
    steps: list[Step] = []
    in_flight: deque[StepPlan] = deque()
    while True:
        while len(in_flight) < STEPS_IN_FLIGHT and (plan := scheduler.plan()):
            plan.command.step = len(steps) + 1
            steps.append(Step(plan.command, plan.num_tokens, len(plan.sampling)))
            in_flight.append(plan)
        if not in_flight:
            return steps
        plan = in_flight.popleft()
        # No request ends by a token, so one will do for all.
        results = _Results([Sampled(token_id=1)] * len(plan.sampling))
        scheduler.process(plan, cast(ExecuteResponse, results))


class ShardAlone:
    """A contender: loads the model in this process, as a shard process would."""

    def __init__(self, model: Path, dtype: str, device: str) -> None:
        config = ShardConfig(model=model, dtype=dtype, device=device)
        loaded = load_shard(config, ShardService(), Probes(), threading.Event())
        self._executor = loaded.executor
        self.vocab_size = loaded.description.vocab_size
        self._device = device
        self._configured: Limits | None = None

    def run(self, work: Work) -> Run:
        """Executes all steps, as the compute thread does: the next before the last one's tokens are read."""
        limits = limits_for(work, self.vocab_size, self._device)
        steps = record(work, limits)
        if limits != self._configured:
            self._executor.configure(_configuration(limits))
            self._configured = limits
        began = time.perf_counter()
        last = None
        for step in steps:
            result = self._executor.execute(step.command)
            if last:
                last.to_proto()
            last = result
        if last:
            last.to_proto()
        seconds = time.perf_counter() - began
        self._leave(steps)
        return Run(seconds, output_tokens(work))

    def _leave(self, steps: list[Step]) -> None:
        """Empties the slots that the end of the run left taken."""
        taken: set[int] = set()
        for step in steps:
            taken -= set(step.command.leaves)
            taken |= {join.slot for join in step.command.joins}
        self._executor.execute(ExecuteRequest(leaves=sorted(taken)))

    def close(self) -> None:
        """Nothing outlives this process."""


def _configuration(limits: Limits) -> ConfigureRequest:
    return ConfigureRequest(
        epoch=1,
        num_blocks=limits.num_blocks,
        block_size=limits.block_size,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
    )
