"""The pool and the tables as they are, for people to look at."""

from pagoda.scheduler.v1.scheduler_pb2 import BlockMapSequence, GetBlockMapResponse, SequenceState
from scheduler.request import Sequence, State
from scheduler.scheduler import Scheduler


def block_map(scheduler: Scheduler) -> GetBlockMapResponse:
    """A snapshot; costs O(blocks), so it is made when asked for and not in steps."""
    device, limits, totals = scheduler.blocks.device, scheduler.limits, scheduler.totals
    blocks = range(limits.num_blocks)
    return GetBlockMapResponse(
        block_size=limits.block_size,
        num_blocks=limits.num_blocks,
        num_host_blocks=limits.num_host_blocks,
        ref_counts=[device.ref_count(block) for block in blocks],
        cached=[device.block_hash(block) is not None for block in blocks],
        sequences=[_sequence(sequence) for sequence in (*scheduler.running, *scheduler.waiting)],
        preemptions=totals.preemptions,
        copies=totals.copies,
        evictions=totals.evictions,
        step=scheduler.num_steps,
    )


def _sequence(sequence: Sequence) -> BlockMapSequence:
    return BlockMapSequence(
        request_id=sequence.request.key[0],
        output_index=sequence.output_index,
        state=_state(sequence),
        block_ids=sequence.block_table or sequence.host_table,
        num_tokens=sequence.length,
        num_computed_tokens=sequence.num_computed,
    )


def _state(sequence: Sequence) -> SequenceState.ValueType:
    if sequence.state is State.RUNNING:
        return SequenceState.SEQUENCE_STATE_RUNNING
    if sequence.host_table:
        return SequenceState.SEQUENCE_STATE_SWAPPED
    if sequence.cached_tokens is not None:
        return SequenceState.SEQUENCE_STATE_PAUSED
    return SequenceState.SEQUENCE_STATE_WAITING
