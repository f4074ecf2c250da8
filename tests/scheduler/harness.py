"""Requests and steps for tests of the scheduler without an engine."""

from collections import deque
from collections.abc import Sequence as Items
from typing import Any

from pagoda.scheduler.v1.scheduler_pb2 import RequestKey, Submit
from pagoda.v1.inference_pb2 import BeamSearch, FinishReason
from pagoda.v1.sampling_pb2 import PositionLogprobs, SamplingParams
from scheduler.admission import make_request
from scheduler.invariants import check
from scheduler.limits import Limits
from scheduler.outbox import Outbox
from scheduler.request import Request
from scheduler.scheduler import Scheduler
from scheduler.step_plan import StepPlan
from tests.scheduler.fake_shard import VOCAB_SIZE, FakeShard


def limits(
    num_blocks: int = 16,
    block_size: int = 4,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 16,
    max_model_len: int = 256,
    num_host_blocks: int = 0,
    preemption_mode: str = "auto",
    prefix_caching: bool = True,
) -> Limits:
    return Limits(
        num_blocks,
        block_size,
        max_num_seqs,
        max_num_batched_tokens,
        max_model_len,
        VOCAB_SIZE,
        num_host_blocks,
        preemption_mode,
        prefix_caching,
    )


def submit(
    name: str,
    prompt: Items[int],
    max_tokens: int = 0,
    stop: Items[int] = (),
    n: int = 1,
    beam_width: int = 0,
    **fields: Any,
) -> Submit:
    beams = BeamSearch(beam_width=beam_width, length_penalty=1) if beam_width else None
    return Submit(
        key=RequestKey(request_id=name, attempt=1),
        prompt_token_ids=prompt,
        max_tokens=max_tokens,
        stop_token_ids=stop,
        n=n,
        beam_search=beams,
        sampling=SamplingParams(temperature=0, top_p=1, repetition_penalty=1),
        **fields,
    )


class Harness:
    """A scheduler and a fake shard, with up to two steps in flight."""

    def __init__(self, lim: Limits) -> None:
        self.limits = lim
        self.scheduler = Scheduler(lim)
        self.requests: dict[str, Request] = {}
        # By request and output.
        self.all_outputs: dict[tuple[str, int], list[int]] = {}
        self.prompt_logprobs: dict[str, list[PositionLogprobs]] = {}
        self.scores: dict[tuple[str, int], float] = {}
        self.reasons: dict[str, FinishReason.ValueType] = {}
        self.in_flight: deque[StepPlan] = deque()
        self.shard = self._new_shard()

    def _new_shard(self) -> FakeShard:
        lim = self.limits
        return FakeShard(
            lim.num_blocks,
            lim.block_size,
            lim.max_num_seqs,
            lim.max_num_batched_tokens,
            lim.num_host_blocks,
        )

    @property
    def outputs(self) -> dict[str, list[int]]:
        """The first output of each request."""
        return {name: tokens for (name, index), tokens in self.all_outputs.items() if index == 0}

    def add(self, message: Submit, arrival: float = 0.0) -> Request:
        name = message.key.request_id
        arrived = (arrival, len(self.requests))
        request = make_request(message, Outbox(), self.limits, "revision", arrived)
        self.requests[name] = request
        for index in range(max(message.n, 1)):
            self.all_outputs[name, index] = []
        self.scheduler.add(request)
        check(self.scheduler)
        return request

    def send(self) -> StepPlan | None:
        plan = self.scheduler.plan()
        check(self.scheduler)
        if plan:
            self.in_flight.append(plan)
        return plan

    def send_and_watch(self) -> None:
        """Sends a step; with none in flight before it, something runs, and the oldest request advances."""
        unfinished = [request for request in self.requests.values() if not request.finished]
        idle = not self.in_flight
        plan = self.send()
        if idle and unfinished:
            oldest = min(unfinished, key=lambda request: request.rank)
            assert plan, "nothing runs while requests wait"
            assert oldest in {sequence.request for sequence, _ in plan.scheduled}, "the oldest stands still"

    def receive(self) -> None:
        """The shard executes the oldest command, and its result comes back."""
        plan = self.in_flight.popleft()
        for output in self.scheduler.process(plan, self.shard.execute(plan.command)):
            key = (output.sequence.request.key[0], output.sequence.output_index)
            self.prompt_logprobs.setdefault(key[0], []).extend(output.prompt_logprobs)
            if not output.token_ids and output.prompt_logprobs:
                continue
            self.all_outputs[key] += output.token_ids
            if output.finish_reason:
                self.reasons[key[0]] = output.finish_reason
            if output.score is not None:
                self.scores[key] = output.score
        check(self.scheduler)

    def fail(self) -> None:
        """The shard is lost with the steps in flight."""
        self.in_flight.clear()
        self.scheduler.reset()
        self.shard = self._new_shard()
        check(self.scheduler)

    def run(self, max_steps: int = 3_000) -> int:
        """Two steps in flight until all is done; returns the number of steps."""
        steps = 0
        while True:
            while len(self.in_flight) < 2 and self.send():
                steps += 1
                assert steps < max_steps, "no end in sight"
            if not self.in_flight:
                return steps
            self.receive()
