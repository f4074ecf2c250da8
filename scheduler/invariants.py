"""What must hold after every step, counted anew from the sequences."""

from itertools import chain

from scheduler.request import State
from scheduler.scheduler import Scheduler, rank_of


def check(scheduler: Scheduler) -> None:
    """Recounts everything; O(blocks + sequences), so for tests, and for when nothing runs.

    Raises:
        AssertionError: something does not hold; the message says what.
    """
    blocks = scheduler.blocks
    blocks.device.check(sequence.block_table for sequence in scheduler.running)
    blocks.host.check(sequence.host_table for sequence in scheduler.waiting)
    _check_slots(scheduler)
    _check_requests(scheduler)
    for name, queue in (("running", scheduler.running), ("waiting", scheduler.waiting)):
        if queue != sorted(queue, key=rank_of):
            raise AssertionError(f"{name} is out of order")
    for sequence in scheduler.running:
        if len(sequence.block_table) < blocks.blocks_for(sequence.num_computed):
            raise AssertionError(f"{sequence.request.key} has computed more than its blocks hold")
        if sequence.host_table:
            raise AssertionError(f"{sequence.request.key} is on both tiers")
    if any(sequence.block_table for sequence in scheduler.waiting):
        raise AssertionError("a waiting sequence holds device blocks")


def _check_slots(scheduler: Scheduler) -> None:
    slots = sorted(chain((sequence.slot for sequence in scheduler.running), scheduler.free_slots))
    if slots != list(range(scheduler.limits.max_num_seqs)):
        raise AssertionError(f"slots {slots} of {scheduler.limits.max_num_seqs}")
    if len(scheduler.running) > scheduler.claimed_slots:
        raise AssertionError(f"{len(scheduler.running)} running, {scheduler.claimed_slots} slots claimed")


def _check_requests(scheduler: Scheduler) -> None:
    requests = {sequence.request for sequence in chain(scheduler.running, scheduler.waiting)}
    claimed = sum(request.claim for request in requests)
    if claimed != scheduler.claimed_slots:
        raise AssertionError(f"{scheduler.claimed_slots} slots claimed, {claimed} counted")
    total = sum(
        sequence.max_length - sequence.num_computed
        for request in requests
        for sequence in request.sequences
        if sequence.state is not State.FINISHED
    )
    if total != scheduler.outstanding_tokens:
        raise AssertionError(f"{scheduler.outstanding_tokens} outstanding tokens, {total} counted")
