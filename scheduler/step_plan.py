"""One step: what was decided, as a command to the shard and as a record for its result."""

from dataclasses import dataclass, field

from pagoda.shard.v1.shard_pb2 import BlockCopy, BlockUpdate, ExecuteRequest, Fork, Join, NextToken, Scheduled
from scheduler.block_manager import Move, Moves
from scheduler.request import Request, Sequence


@dataclass
class StepPlan:
    """One step that was sent: results are matched to this, never to whatever holds a slot by then.

    `sampling` are the sequences that sample, in the order of the result. `prompt_chunks` are, by slot, those
    that have log-probabilities of their prompt to report, with how many tokens were computed before the step.
    `admitted` are requests that run for the first time.
    """

    command: ExecuteRequest
    scheduled: list[tuple[Sequence, int]]
    sampling: list[Sequence] = field(default_factory=list)
    prompt_chunks: dict[int, tuple[Sequence, int]] = field(default_factory=dict)
    admitted: list[Request] = field(default_factory=list)
    num_decode_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(count for _, count in self.scheduled)


def build_command(scheduled: list[tuple[Sequence, int]], leaves: list[int], moves: Moves) -> ExecuteRequest:
    """Everything that changed since the last command. Sequences that had not joined have joined after it."""
    command = ExecuteRequest(
        leaves=leaves,
        swap_outs=_copies(moves.swap_outs),
        swap_ins=_copies(moves.swap_ins),
        scheduled=[Scheduled(slot=sequence.slot, num_tokens=count) for sequence, count in scheduled],
    )
    for sequence, update in moves.updates.items():
        command.copies.extend(_copies(update.copies))
        if sequence.joined:
            command.block_updates.append(
                BlockUpdate(slot=sequence.slot, start=update.start, block_ids=update.block_ids)
            )
    for sequence, _ in scheduled:
        if not sequence.joined:
            command.joins.append(_join(sequence))
            sequence.joined = True
        elif sequence.next_token is not None:
            command.next_tokens.append(NextToken(slot=sequence.slot, token_id=sequence.next_token))
        sequence.next_token = None
    return command


def fork_command(parent: Sequence, children: list[Sequence]) -> Fork:
    """The children become copies of the parent, where its logits are sampled."""
    for child in children:
        child.joined = True
    return Fork(source_slot=parent.slot, targets=[_join(child, with_tokens=False) for child in children])


def _join(sequence: Sequence, with_tokens: bool = True) -> Join:
    request, submit = sequence.request, sequence.request.submit
    constrained = submit.HasField("constraint")
    return Join(
        slot=sequence.slot,
        token_ids=sequence.token_ids if with_tokens else (),
        prompt_length=request.prompt_length,
        computed_length=sequence.num_computed,
        block_ids=sequence.block_table,
        sampling=submit.sampling,
        output_index=sequence.output_index,
        adapter=submit.adapter,
        num_candidates=request.beams.num_candidates if request.beams else 0,
        constraint=submit.constraint if constrained and with_tokens else None,
        stop_token_ids=submit.stop_token_ids if constrained or submit.min_tokens else (),
        min_tokens=submit.min_tokens,
        prompt_logprobs=submit.prompt_logprobs if sequence.next_prompt_logprob else None,
    )


def _copies(moves: list[Move]) -> list[BlockCopy]:
    return [BlockCopy(source=source, destination=destination) for source, destination in moves]
