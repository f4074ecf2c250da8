"""The policy: who runs in the next step, with which blocks, and what a result means.

First come, first served. The latest-arrived running request is preempted first, and rejoins by recompute.
A plan is made in two passes (DESIGN: policy): first blocks are secured in arrival order, and victims chosen;
then the token budget is spent, decodes before prefill chunks. So a victim is never in the command already.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain

from pagoda.shard.v1.shard_pb2 import AppendBlocks, ExecuteRequest, ExecuteResponse, Join, Sampled, Scheduled
from pagoda.v1.inference_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP, FinishReason
from scheduler.block_pool import BlockPool
from scheduler.request import Request, Sequence, State

# A request that was in this many failed steps runs alone from then on; one more ends it.
SUSPECT_AFTER_FAILED_STEPS = 3


@dataclass(frozen=True)
class Limits:
    """What one replica can hold and compute."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    vocab_size: int

    @property
    def watermark(self) -> int:
        """Blocks that admission leaves free, so that running sequences can grow for a while: 1 %."""
        return self.num_blocks // 100

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)


@dataclass
class StepPlan:
    """One step that was sent: results are matched to this, never to whatever holds a slot by then."""

    command: ExecuteRequest
    scheduled: list[tuple[Sequence, int]]
    sampling: list[Sequence] = field(default_factory=list)
    num_decode_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(count for _, count in self.scheduled)


@dataclass(frozen=True)
class TokenOutput:
    """One token of one sequence, and what ended the sequence if this did."""

    sequence: Sequence
    sampled: Sampled
    finish_reason: FinishReason.ValueType


class Scheduler:
    """The queues, the pool and the slots of one replica. Pure: no clock, no I/O."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.num_preemptions = 0
        # Prompt and output tokens still to compute, over all requests.
        self.outstanding_tokens = 0
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self._clear_shard_state()

    def _clear_shard_state(self) -> None:
        self.pool = BlockPool(self.limits.num_blocks)
        self._free_slots = list(range(self.limits.max_num_seqs))[::-1]
        self._leaves: list[int] = []

    # Requests come and go.

    def add(self, request: Request) -> None:
        """Queues a request by its rank. It must be feasible: its blocks fit the whole pool."""
        for sequence in request.sequences:
            if sequence.state is State.WAITING:
                self.outstanding_tokens += sequence.max_length
                insort(self.waiting, sequence, key=_rank)

    def finish(self, sequence: Sequence) -> None:
        """Ends a sequence, wherever it is, and frees its blocks at once."""
        if sequence.state is State.FINISHED:
            return
        self.outstanding_tokens -= sequence.max_length - sequence.num_computed
        if sequence.state is State.RUNNING:
            self._leave(sequence)
        else:
            _remove(self.waiting, sequence)
        sequence.state = State.FINISHED

    def reset(self) -> None:
        """The shard lost everything: all running sequences wait again, in order, with the tokens received."""
        for sequence in self.running:
            self._pause(sequence)
        for sequence in self.waiting:
            sequence.num_pending = 0
        self.running.clear()
        self._clear_shard_state()

    # One step.

    def plan(self) -> StepPlan | None:
        """The next step, or None when nothing can run before a result comes back."""
        appended: dict[Sequence, list[int]] = {}
        preempted = self._secure_blocks(appended)
        counts = self._spend_budget(appended, admit=not preempted)
        return self._command(counts, appended) if counts else None

    def _secure_blocks(self, appended: dict[Sequence, list[int]]) -> bool:
        """First pass: each decode, and the oldest prefill, gets blocks for its minimum or a victim pays."""
        preempted = False
        prefill_secured = False
        index = 0
        while index < len(self.running):
            sequence = self.running[index]
            minimum = 0
            if sequence.decoding:
                minimum = int(sequence.runnable)
            elif not prefill_secured:
                minimum = min(sequence.num_uncomputed, self.limits.block_size)
                prefill_secured = True
            while not self._grow(sequence, minimum, appended):
                victim = self.running[-1].request
                self._preempt(victim, appended)
                preempted = True
                if victim is sequence.request:
                    return True
            index += 1
        return preempted

    def _spend_budget(self, appended: dict[Sequence, list[int]], admit: bool) -> dict[Sequence, int]:
        """Second pass: tokens per sequence. Decodes always fit: the budget has a block on top."""
        counts = {s: 1 for s in self.running if s.decoding and s.runnable}
        budget = self.limits.max_num_batched_tokens - len(counts)
        prefills = [s for s in self.running if not s.decoding]
        contended = len(prefills) + len(self.waiting) > 1
        share = max(budget // 2, self.limits.block_size) if contended else budget

        def grant(sequence: Sequence, at_most: int) -> None:
            nonlocal budget
            granted = counts.get(sequence, 0)
            room = (len(sequence.block_table) + self.pool.num_free) * self.limits.block_size
            wanted = min(sequence.num_uncomputed, room - sequence.num_computed) - granted
            count = min(wanted, at_most, budget)
            if count > 0:
                self._grow(sequence, granted + count, appended)
                counts[sequence] = granted + count
                budget -= count

        for sequence in prefills:
            grant(sequence, share)
        if admit:
            for sequence in self._admissible(prefills):
                if not budget:
                    break
                self._admit(sequence)
                prefills.append(sequence)
                grant(sequence, share)
        for sequence in prefills:
            grant(sequence, budget)
        return counts

    def _admissible(self, prefills: list[Sequence]) -> Iterator[Sequence]:
        """Waiting sequences that may join now, in order. Nobody passes one that may not."""
        while self.waiting and len(self.running) < self.limits.max_num_seqs:
            sequence = self.waiting[0]
            if sequence.num_pending:
                return
            if self.running and any(_suspect(s.request) for s in (sequence, self.running[0])):
                return
            still_to_come = sum(self._blocks_missing(s) for s in prefills)
            spare = self.pool.num_free - still_to_come - (self.limits.watermark if self.running else 0)
            if self._blocks_missing(sequence) > spare:
                return
            yield sequence

    def _command(self, counts: dict[Sequence, int], appended: dict[Sequence, list[int]]) -> StepPlan:
        command = ExecuteRequest(leaves=self._leaves)
        self._leaves = []
        plan = StepPlan(command, list(counts.items()))
        for sequence, count in plan.scheduled:
            if not sequence.num_computed:
                command.joins.append(_join(sequence))
            elif sequence in appended:
                command.appends.append(AppendBlocks(slot=sequence.slot, block_ids=appended[sequence]))
            command.scheduled.append(Scheduled(slot=sequence.slot, num_tokens=count))
            plan.num_decode_tokens += sequence.decoding and sequence.length > sequence.request.prompt_length
            sequence.num_computed += count
            self.outstanding_tokens -= count
            if sequence.num_computed == sequence.length:
                sequence.num_pending += 1
                plan.sampling.append(sequence)
        return plan

    def process(self, plan: StepPlan, response: ExecuteResponse) -> list[TokenOutput]:
        """Takes the result of the oldest step in flight. A token of a sequence that has ended is dropped."""
        outputs = []
        for sequence, sampled in zip(plan.sampling, response.sampled, strict=True):
            if sequence.state is State.FINISHED:
                continue
            sequence.num_pending -= 1
            reason = FinishReason.FINISH_REASON_UNSPECIFIED
            if not sampled.invalid:
                sequence.token_ids.append(sampled.token_id)
                if sampled.token_id in sequence.request.stop_token_ids:
                    reason = FINISH_REASON_STOP
                elif len(sequence.token_ids) >= sequence.max_length:
                    reason = FINISH_REASON_LENGTH
            if reason or sampled.invalid:
                self.finish(sequence)
            outputs.append(TokenOutput(sequence, sampled, reason))
        return outputs

    # Blocks and slots.

    def _blocks_missing(self, sequence: Sequence) -> int:
        return self.limits.blocks_for(sequence.length) - len(sequence.block_table)

    def _grow(self, sequence: Sequence, count: int, appended: dict[Sequence, list[int]]) -> bool:
        """Makes room for `count` more tokens; False when the pool can't give it."""
        missing = self.limits.blocks_for(sequence.num_computed + count) - len(sequence.block_table)
        if missing <= 0 or not count:
            return True
        if missing > self.pool.num_free:
            return False
        blocks = self.pool.allocate(missing)
        sequence.block_table += blocks
        appended.setdefault(sequence, []).extend(blocks)
        return True

    def _admit(self, sequence: Sequence) -> None:
        self.waiting.pop(0)
        sequence.state = State.RUNNING
        sequence.slot = self._free_slots.pop()
        insort(self.running, sequence, key=_rank)

    def _preempt(self, request: Request, appended: dict[Sequence, list[int]]) -> None:
        self.num_preemptions += 1
        for sequence in request.sequences:
            if sequence.state is State.RUNNING:
                appended.pop(sequence, None)
                self._leave(sequence)
                self._pause(sequence)

    def _leave(self, sequence: Sequence) -> None:
        _remove(self.running, sequence)
        self.pool.free(sequence.block_table)
        sequence.block_table = []
        self._free_slots.append(sequence.slot)
        self._leaves.append(sequence.slot)

    def _pause(self, sequence: Sequence) -> None:
        """A token in flight is kept: the sequence can't resume until it came back."""
        self.outstanding_tokens += sequence.num_computed
        sequence.block_table = []
        sequence.slot = -1
        sequence.num_computed = 0
        sequence.state = State.WAITING
        insort(self.waiting, sequence, key=_rank)

    def check(self) -> None:
        """Recounts the invariants.

        Raises:
            AssertionError: one does not hold.
        """
        self.pool.check(sequence.block_table for sequence in self.running)
        slots = sorted(chain((s.slot for s in self.running), self._free_slots))
        if slots != list(range(self.limits.max_num_seqs)):
            raise AssertionError(f"slots {slots} of {self.limits.max_num_seqs}")
        total = sum(s.max_length - s.num_computed for s in chain(self.running, self.waiting))
        if total != self.outstanding_tokens:
            raise AssertionError(f"{self.outstanding_tokens} outstanding tokens, {total} counted")
        for name, queue in (("running", self.running), ("waiting", self.waiting)):
            if queue != sorted(queue, key=_rank):
                raise AssertionError(f"{name} is out of order")
        for sequence in self.running:
            if len(sequence.block_table) < self.limits.blocks_for(sequence.num_computed):
                raise AssertionError(f"{sequence.request.key} has computed more than its blocks hold")
        if any(sequence.block_table for sequence in self.waiting):
            raise AssertionError("a waiting sequence holds blocks")


def _join(sequence: Sequence) -> Join:
    request = sequence.request
    return Join(
        slot=sequence.slot,
        token_ids=sequence.token_ids,
        prompt_length=request.prompt_length,
        block_ids=sequence.block_table,
        sampling=request.submit.sampling,
        output_index=sequence.output_index,
        adapter=request.submit.adapter,
    )


def _rank(sequence: Sequence) -> tuple[float, int, int]:
    return (*sequence.request.rank, sequence.output_index)


def _remove(queue: list[Sequence], sequence: Sequence) -> None:
    del queue[bisect_left(queue, _rank(sequence), key=_rank)]


def _suspect(request: Request) -> bool:
    return request.failed_steps >= SUSPECT_AFTER_FAILED_STEPS


def blame(plans: Iterable[StepPlan]) -> list[Request]:
    """Counts a failed step against every request that was in it; returns those that failed alone too."""
    requests = {sequence.request for plan in plans for sequence, _ in plan.scheduled}
    for request in requests:
        request.failed_steps += 1
    return [request for request in requests if request.failed_steps > SUSPECT_AFTER_FAILED_STEPS]
