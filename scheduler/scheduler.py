"""The policy: who runs in the next step, with which blocks, and what a result means.

First come, first served, within a priority. The latest-arrived running request is preempted first, whole. A
plan is made in two passes: first blocks are secured in order of rank, and victims chosen; then the token
budget is spent, decodes before prefill chunks. So a victim is never in the command already.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from pagoda.shard.v1.shard_pb2 import ExecuteResponse, Sampled
from pagoda.v1.inference_pb2 import (
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    FINISH_REASON_UNSPECIFIED,
    FinishReason,
)
from pagoda.v1.sampling_pb2 import PositionLogprobs
from scheduler.beam_search import Candidate
from scheduler.block_manager import BlockManager
from scheduler.limits import Limits
from scheduler.request import Request, Sequence, State
from scheduler.step_plan import StepPlan, build_command, fork_command
from scheduler.suspects import Suspects
from scheduler.totals import Totals

# Of prompts, that one step returns at most: about 4 MiB on the wire.
MAX_STEP_LOGPROBS: Final = 2**18


class SequenceResult(NamedTuple):
    """What one step gave one sequence: new tokens, and what ended it if something did.

    Or, without a token, log-probabilities of its prompt.
    """

    sequence: Sequence
    token_ids: list[int]
    finish_reason: FinishReason.ValueType
    sampled: Sampled | None = None
    score: float | None = None
    prompt_logprobs: Iterable[PositionLogprobs] = ()


class Scheduler:
    """The queues, the blocks and the slots of one replica. Pure: no clock, no I/O.

    Requests that are traced keep time by themselves.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.totals = Totals()
        self.num_steps = 0
        # Prompt and output tokens still to compute, over all requests.
        self.outstanding_tokens = 0
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        # For the first time, since the last plan.
        self._admitted: list[Request] = []
        self.suspects = Suspects()
        self._clear_shard_state()

    def _clear_shard_state(self) -> None:
        limits = self.limits
        self.blocks = BlockManager(limits.num_blocks, limits.num_host_blocks, limits.block_size, self.totals)
        self.free_slots = list(range(limits.max_num_seqs))[::-1]
        self._leaves: list[int] = []
        self.claimed_slots = 0

    # Requests come and go.

    def add(self, request: Request) -> None:
        """Queues a request by its rank. It must be feasible: its blocks fit the whole pool."""
        for sequence in request.sequences:
            if sequence.state is not State.FINISHED:
                self.outstanding_tokens += sequence.max_length
            if sequence.state is State.WAITING:
                insort(self.waiting, sequence, key=rank_of)

    def finish(self, sequence: Sequence) -> None:
        """Ends a sequence, wherever it is, and frees its blocks at once."""
        if sequence.state is State.FINISHED:
            return
        self.outstanding_tokens -= sequence.max_length - sequence.num_computed
        if sequence.state is State.RUNNING:
            self._leave(sequence)
        elif sequence.state is State.WAITING:
            _remove(self.waiting, sequence)
        self.blocks.release(sequence)
        sequence.state = State.FINISHED
        request = sequence.request
        if request.finished:
            self._set_claim(request, 0)
            self.suspects.discard(request)
        elif request.claim and not request.beams:
            self._set_claim(request, request.claim - 1)
        if request.forking and len(request.forking) == request.demand:
            # Their leader is gone before it could be copied.
            heir = request.forking[0]
            heir.state = State.WAITING
            heir.next_prompt_logprob = sequence.next_prompt_logprob
            insort(self.waiting, heir, key=rank_of)

    def _set_claim(self, request: Request, claim: int) -> None:
        self.claimed_slots += claim - request.claim
        request.claim = claim

    def reset(self) -> None:
        """The shard lost everything: all sequences wait, in order, with the tokens received."""
        for sequence in [*self.running, *self.waiting]:
            self.outstanding_tokens += sequence.num_computed
            sequence.block_table, sequence.host_table = [], []
            sequence.num_computed = sequence.num_pending = sequence.num_registered = 0
            sequence.candidates = sequence.next_token = None
            sequence.joined = False
            sequence.slot = -1
            sequence.state = State.WAITING
            sequence.request.claim = 0
        self.waiting = sorted([*self.running, *self.waiting], key=rank_of)
        self.running.clear()
        self._clear_shard_state()

    # One step.

    def plan(self) -> StepPlan | None:
        """The next step, or None when nothing can run before a result comes back."""
        decodes, preempted = self._secure_blocks()
        counts = self._spend_budget(decodes, admit=not preempted)
        return self._send(counts) if counts or self.blocks.swapping else None

    def _secure_blocks(self) -> tuple[list[Sequence], bool]:
        """First pass: each decode, and the first prefill, gets blocks for its minimum or a victim pays.

        Returns the decodes that are to run, and whether somebody paid.
        """
        decodes: list[Sequence] = []
        preempted = False
        prefill_secured = False
        index = 0
        while index < len(self.running):
            sequence = self.running[index]
            index += 1
            uncomputed = sequence.num_uncomputed
            if not sequence.runnable or (uncomputed > 1 and prefill_secured):
                continue
            if uncomputed > 1:
                minimum = min(uncomputed, self.limits.block_size)
                prefill_secured = True
            else:
                minimum = 1
                decodes.append(sequence)
            while not (self.blocks.has_room(sequence, minimum) or self.blocks.grow(sequence, minimum)):
                victim = self.running[-1].request
                self._preempt(victim)
                preempted = True
                if victim is sequence.request:
                    break
        if preempted:
            decodes = [sequence for sequence in decodes if sequence.state is State.RUNNING]
        return decodes, preempted

    def _spend_budget(self, decodes: list[Sequence], admit: bool) -> dict[Sequence, int]:
        """Second pass: tokens per sequence. Decodes always fit: the budget has a block on top."""
        counts = dict.fromkeys(decodes, 1)
        budget = self.limits.max_num_batched_tokens - len(counts)
        prefills = []
        if len(counts) < len(self.running):
            prefills = [s for s in self.running if s.num_uncomputed > 1 and s.runnable]
        contended = len(prefills) + len(self.waiting) > 1
        share = max(budget // 2, self.limits.block_size) if contended else budget
        logprobs = MAX_STEP_LOGPROBS

        def grant(sequence: Sequence, at_most: int) -> None:
            nonlocal budget, logprobs
            granted = counts.get(sequence, 0)
            wanted = min(sequence.num_uncomputed, self.blocks.room(sequence)) - granted
            per_token = sequence.logprobs_per_prompt_token
            count = min(wanted, at_most, budget, logprobs // per_token if per_token else budget)
            if count > 0 and self.blocks.grow(sequence, granted + count):
                counts[sequence] = granted + count
                budget -= count
                logprobs -= count * per_token
                self.blocks.register(sequence, sequence.num_computed + granted + count)

        for sequence in prefills:
            grant(sequence, share)
        if admit:
            for admitted in self._admit(prefills):
                prefills += admitted
                for sequence in admitted:
                    grant(sequence, share)
                if not budget:
                    break
        for sequence in prefills:
            grant(sequence, budget)
        return counts

    # Admission.

    def _admit(self, prefills: list[Sequence]) -> Iterator[list[Sequence]]:
        """Lets waiting sequences join, in order; yields those that have tokens to compute.

        Nobody passes one that may not join, unless its constraint isn't prepared. `prefills` grows with what
        was yielded.
        """
        while head := self._next_to_admit():
            group = self._group(head)
            if any(s.num_pending for s in group) or not self._has_slots(head.request):
                return
            still_to_come = sum(self._blocks_missing(s) for s in prefills)
            alone = all(sequence.request is head.request for sequence in self.running)
            spare = self.blocks.device.num_available - still_to_come - (0 if alone else self.limits.watermark)
            if head.host_table:
                # One block more for each sequence, so that they don't have to leave again at once.
                extra = 0 if alone else len(group)
                if self.blocks.num_needed_to_swap_in(group) + extra > spare:
                    return
                self.blocks.swap_in(group)
            else:
                prefix = self.blocks.find_prefix(head)
                if self._is_being_computed(head, len(prefix), prefills):
                    return
                if self.blocks.num_needed(head, prefix) > spare:
                    return
                self._attach(head, prefix)
            if not head.request.claim:
                self._set_claim(head.request, head.request.demand)
            for sequence in group:
                _remove(self.waiting, sequence)
                self._run(sequence)
            yield group

    def _next_to_admit(self) -> Sequence | None:
        """The head of the queue; while there are suspects the first of them, once nobody else runs."""
        ready = (s for s in self.waiting if not s.request.preparing)
        if not self.suspects:
            return next(ready, None)
        head = next((s for s in ready if s.request in self.suspects), None)
        others_run = head and self.running and self.running[0].request is not head.request
        return None if others_run else head

    def _group(self, head: Sequence) -> list[Sequence]:
        """What has to be admitted with the head of the queue: with a swapped-out one, its whole request."""
        if not head.host_table:
            return [head]
        return [s for s in head.request.sequences if s.state is State.WAITING and s.host_table]

    def _has_slots(self, request: Request) -> bool:
        return bool(request.claim) or self.claimed_slots + request.demand <= self.limits.max_num_seqs

    def _is_being_computed(self, sequence: Sequence, index: int, prefills: list[Sequence]) -> bool:
        """Whether a running prefill is about to compute the very block that this one needs next."""
        if index >= sequence.max_prefix // self.limits.block_size:
            return False
        wanted = sequence.block_hashes[index]
        return any(index < len(s.block_hashes) and s.block_hashes[index] == wanted for s in prefills)

    def _attach(self, sequence: Sequence, prefix: list[int]) -> None:
        self.blocks.attach(sequence, prefix)
        # Of a beam whose result came back after it was preempted: it is computed, and so sampled, again.
        # Until then the other beams must not go on with it.
        sequence.candidates = None
        self.outstanding_tokens -= sequence.num_computed
        if sequence.cached_tokens is None:
            sequence.cached_tokens = min(sequence.num_computed, sequence.request.prompt_length)
            sequence.reports_cached = sequence.cached_tokens > 0
            self._admitted.append(sequence.request)

    def _blocks_missing(self, sequence: Sequence) -> int:
        return self.blocks.blocks_for(sequence.length) - len(sequence.block_table)

    def _run(self, sequence: Sequence) -> None:
        if trace := sequence.request.trace:
            trace.admitted()
        sequence.state = State.RUNNING
        sequence.slot = self.free_slots.pop()
        insort(self.running, sequence, key=rank_of)

    # Sending.

    def _send(self, counts: dict[Sequence, int]) -> StepPlan:
        scheduled = list(counts.items())
        self.num_steps += 1
        plan = StepPlan(build_command(scheduled, self._leaves, self.blocks.take_moves()), scheduled)
        self._leaves = []
        plan.admitted, self._admitted = self._admitted, []
        forked: list[Sequence] = []
        for sequence, count in scheduled:
            length = sequence.length
            if sequence.num_computed + 1 == length and length > sequence.request.prompt_length:
                plan.num_decode_tokens += 1
            if sequence.next_prompt_logprob:
                plan.prompt_chunks[sequence.slot] = (sequence, sequence.num_computed)
            sequence.num_computed += count
            self.blocks.register_full(sequence)
            if sequence.num_computed == length:
                sequence.num_pending += 1
                plan.sampling.append(sequence)
                if len(sequence.request.sequences) > 1 and (children := sequence.request.forking):
                    forked += self._fork(sequence, children)
                    plan.command.forks.append(fork_command(sequence, children))
        self.outstanding_tokens -= plan.num_tokens
        plan.sampling += forked
        return plan

    def _fork(self, parent: Sequence, children: list[Sequence]) -> list[Sequence]:
        for child in children:
            self._copy(parent, child)
            child.num_pending = parent.num_pending
            self._run(child)
        return children

    def _copy(self, parent: Sequence, child: Sequence) -> None:
        self.blocks.fork(parent, child)
        self.outstanding_tokens -= child.num_computed
        child.cached_tokens = parent.cached_tokens
        child.reports_cached = parent.reports_cached

    # Results.

    def process(self, plan: StepPlan, response: ExecuteResponse) -> list[SequenceResult]:
        """Takes the result of the oldest step in flight. A token of a sequence that has ended is dropped."""
        results: list[SequenceResult] = []
        for chunk in response.prompt_logprobs:
            sequence, start = plan.prompt_chunks.get(chunk.slot, (None, 0))
            if sequence and (logprobs := sequence.take_prompt_logprobs(start, chunk.positions)):
                reason = FINISH_REASON_UNSPECIFIED
                results.append(SequenceResult(sequence, [], reason, prompt_logprobs=logprobs))
        searching: dict[Request, None] = {}
        for sequence, sampled in zip(plan.sampling, response.sampled, strict=True):
            if sequence.state is State.FINISHED:
                continue
            sequence.num_pending -= 1
            if trace := sequence.request.trace:
                trace.sampled()
            if sampled.invalid:
                self.finish(sequence)
                results.append(SequenceResult(sequence, [], FINISH_REASON_UNSPECIFIED, sampled))
            elif sequence.request.beams:
                sequence.candidates = [Candidate(c.token_id, c.logprob) for c in sampled.candidates]
                searching[sequence.request] = None
            else:
                results.append(self._take_token(sequence, sampled))
        for request in searching:
            if all(sequence.candidates is not None for sequence in request.sequences):
                results += self._advance_beams(request)
        if self.suspects and plan.sampling:
            self._take_success(plan.sampling[0].request)
        return results

    def _take_success(self, request: Request) -> None:
        """Of a request that runs alone, if it is suspected. Once it is cleared, it's the next one's turn."""
        if request in self.suspects and self.suspects.succeeded(request) and self.suspects:
            self._preempt(request)

    def _take_token(self, sequence: Sequence, sampled: Sampled) -> SequenceResult:
        sequence.token_ids.append(sampled.token_id)
        reason = FINISH_REASON_UNSPECIFIED
        if sampled.token_id in sequence.request.stop_token_ids:
            reason = FINISH_REASON_STOP
        elif len(sequence.token_ids) >= sequence.max_length:
            reason = FINISH_REASON_LENGTH
        if sequence.state is State.RUNNING:
            self.blocks.register_full(sequence)
        if reason:
            self.finish(sequence)
        return SequenceResult(sequence, [sampled.token_id], reason, sampled)

    def _advance_beams(self, request: Request) -> list[SequenceResult]:
        """From the beams of one step to those of the next: forks, drops, and a next token for each."""
        assert request.beams  # noqa: S101
        parents = request.sequences
        going_on = request.beams.advance(
            [sequence.token_ids[request.prompt_length :] for sequence in parents],
            [sequence.candidates or [] for sequence in parents],
        )
        if not going_on:
            return self._finish_beams(request)
        continued = {continuation.parent for continuation in going_on}
        for index, parent in enumerate(parents):
            parent.candidates = None
            if index not in continued:
                self.finish(parent)
        # Children are copies of their parents as they were, so the last child of each takes its place.
        beams = []
        remaining = Counter(continuation.parent for continuation in going_on)
        for continuation in going_on:
            parent = parents[continuation.parent]
            remaining[continuation.parent] -= 1
            beam = self._new_beam(parent) if remaining[continuation.parent] else parent
            beams.append((beam, continuation.token_id))
        for beam, token_id in beams:
            beam.token_ids.append(token_id)
            beam.next_token = token_id
        request.sequences = [beam for beam, _ in beams]
        self._rank_beams(request)
        return []

    def _new_beam(self, parent: Sequence) -> Sequence:
        child = Sequence(parent.request, -1, list(parent.token_ids), parent.max_length, parent.state)
        self.outstanding_tokens += child.max_length
        self._copy(parent, child)
        if child.state is State.RUNNING:
            child.slot = self.free_slots.pop()
        return child

    def _rank_beams(self, request: Request) -> None:
        """Beams are ranked within their request by score, which changes with each step."""
        for queue in (self.running, self.waiting):
            queue[:] = [sequence for sequence in queue if sequence.request is not request]
        for index, sequence in enumerate(request.sequences):
            sequence.output_index = index
            if sequence.state is State.RUNNING:
                self.blocks.register_full(sequence)
            insort(self.running if sequence.state is State.RUNNING else self.waiting, sequence, key=rank_of)

    def _finish_beams(self, request: Request) -> list[SequenceResult]:
        assert request.beams  # noqa: S101
        for sequence in request.sequences:
            self.finish(sequence)
        results = []
        for index, hypothesis in enumerate(request.beams.finished[: request.submit.n]):
            reason = FINISH_REASON_STOP if hypothesis.stopped else FINISH_REASON_LENGTH
            sequence = Sequence(request, index, [], 0, State.FINISHED)
            sequence.cached_tokens = request.sequences[0].cached_tokens
            sequence.reports_cached = bool(sequence.cached_tokens)
            results.append(SequenceResult(sequence, hypothesis.token_ids, reason, score=hypothesis.score))
        return results

    # Preemption.

    def _preempt(self, request: Request) -> None:
        victims = request.running
        self._set_claim(request, 0)
        several = len(victims) > 1
        mode = self.limits.preemption_mode
        # A prefill that isn't done would bring back what it then has to go on computing anyway.
        wanted = (mode == "swap" or (mode == "auto" and several)) and all(s.decoding for s in victims)
        swapped = wanted and not request.forking and self.blocks.swap_out(victims)
        if request.trace:
            request.trace.event("preempted", mode="swap" if swapped else "recompute")
        self.totals.swaps += swapped
        self.totals.recomputes += not swapped
        for sequence in victims:
            self._leave(sequence)
            if not swapped:
                self.blocks.release(sequence)
                self.outstanding_tokens += sequence.num_computed
                sequence.num_computed = 0
                sequence.candidates = None
            # A token in flight is kept: the sequence can't resume until it came back.
            sequence.state = State.WAITING
            insort(self.waiting, sequence, key=rank_of)

    def _leave(self, sequence: Sequence) -> None:
        _remove(self.running, sequence)
        self.free_slots.append(sequence.slot)
        if sequence.joined:
            self._leaves.append(sequence.slot)
        sequence.slot = -1
        sequence.joined = False
        sequence.next_token = None


def rank_of(sequence: Sequence) -> tuple[int, float, int, int]:
    """What both queues are ordered by."""
    return (*sequence.request.rank, sequence.output_index)


def _remove(queue: list[Sequence], sequence: Sequence) -> None:
    del queue[bisect_left(queue, rank_of(sequence), key=rank_of)]
