"""A shard without a model: it keeps tokens in blocks where a real one keeps K and V.

Its next token is a hash of what it reads through the block table, so a block given out too early, written by
two sequences or missing from a table changes the output.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from pagoda.shard.v1.shard_pb2 import (
    ConfigureRequest,
    ExecuteRequest,
    ExecuteResponse,
    Join,
    PromptLogprobs,
    Sampled,
)
from pagoda.v1.sampling_pb2 import PositionLogprobs, TokenLogprob
from scheduler.beam_search import BeamSearch, Candidate

VOCAB_SIZE = 1000


def _mix(tokens: Sequence[int], salt: int) -> int:
    value = 17 + 7919 * salt
    for token in tokens:
        value = (value * 31 + token + 1) % 1_000_003
    return value


def next_token(tokens: Sequence[int], output_index: int = 0, banned: frozenset[int] = frozenset()) -> int:
    """What the "model" says after `tokens`, sampled for one of a request's outputs."""
    token = _mix(tokens, output_index) % VOCAB_SIZE
    while token in banned:
        token = (token + 1) % VOCAB_SIZE
    return token


def next_candidates(tokens: Sequence[int], count: int) -> list[Candidate]:
    """Likeliest first, as a beam search wants them."""
    value = _mix(tokens, 0)
    candidates = []
    logprob = 0.0
    for rank in range(min(count, VOCAB_SIZE)):
        value = (value * 1103515245 + 12345) % (1 << 31)
        logprob -= 0.05 + value / (1 << 31)
        candidates.append(Candidate((value + rank) % VOCAB_SIZE, logprob))
    return candidates


def prompt_logprob(tokens: Sequence[int], position: int) -> PositionLogprobs:
    """Of the token at a position of a prompt, after those before it."""
    logprob = -_mix(tokens[:position], 0)
    return PositionLogprobs(chosen=TokenLogprob(token_id=tokens[position], logprob=logprob))


def expected_output(
    prompt: Sequence[int],
    max_tokens: int,
    stop: frozenset[int] = frozenset(),
    output_index: int = 0,
    min_tokens: int = 0,
) -> list[int]:
    """The output of a request that runs alone, with unlimited memory."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        banned = stop if len(tokens) < len(prompt) + min_tokens else frozenset[int]()
        tokens.append(next_token(tokens, output_index, banned))
        if tokens[-1] in stop:
            break
    return tokens[len(prompt) :]


def expected_beams(prompt: Sequence[int], search: BeamSearch) -> list[list[int]]:
    """The outputs of a beam search that runs alone, best first."""
    outputs: list[list[int]] = [[]]
    while outputs:
        offers = [next_candidates([*prompt, *output], search.num_candidates) for output in outputs]
        going_on = search.advance(outputs, offers)
        outputs = [[*outputs[one.parent], one.token_id] for one in going_on]
    return [hypothesis.token_ids for hypothesis in search.finished]


@dataclass
class FakeSlot:
    tokens: list[int]
    output_index: int
    num_candidates: int
    computed: int = 0
    block_table: list[int] = field(default_factory=list)
    # Of the prompt, if its log-probabilities are wanted.
    prompt_length: int = 0
    # Not sampled before there are so many tokens.
    stop_token_ids: frozenset[int] = frozenset()
    min_length: int = 0


class FakeShard:
    """Executes commands strictly in order, and checks each against the contract."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        num_host_blocks: int = 0,
    ) -> None:
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.blocks: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.host_blocks: list[list[int | None]] = [[None] * block_size for _ in range(num_host_blocks)]
        self.slots: dict[int, FakeSlot] = {}
        self.computed_tokens = 0
        self.next_step = 0

    @classmethod
    def configured(cls, request: ConfigureRequest) -> "FakeShard":
        return cls(
            request.num_blocks,
            request.block_size,
            request.max_num_seqs,
            request.max_num_batched_tokens,
            request.num_host_blocks,
        )

    def execute(self, command: ExecuteRequest) -> ExecuteResponse:
        for leaving in command.leaves:
            del self.slots[leaving]
        for join in command.joins:
            self._join(join)
        for update in command.block_updates:
            table = self.slots[update.slot].block_table
            assert update.start <= len(table)
            table[update.start :] = update.block_ids
        for override in command.next_tokens:
            self.slots[override.slot].tokens[-1] = override.token_id
        assert not (command.swap_outs and command.swap_ins), "a command swaps in both directions"
        for sources, destinations, moves in (
            (self.blocks, self.host_blocks, command.swap_outs),
            (self.blocks, self.blocks, command.copies),
            (self.host_blocks, self.blocks, command.swap_ins),
        ):
            contents = [list(sources[move.source]) for move in moves]
            assert len({move.destination for move in moves}) == len(moves), "two moves to one block"
            for content, move in zip(contents, moves, strict=True):
                destinations[move.destination] = content
        assert sum(s.num_tokens for s in command.scheduled) <= self.max_num_batched_tokens
        assert len({s.slot for s in command.scheduled}) == len(command.scheduled), "a slot twice in one step"

        written: set[tuple[int, int]] = set()
        rows: dict[int, list[int]] = {}
        sampled = []
        prompt_logprobs = []
        for scheduled in command.scheduled:
            slot = self.slots[scheduled.slot]
            end = slot.computed + scheduled.num_tokens
            assert slot.computed < end <= len(slot.tokens)
            for position in range(slot.computed, end):
                block, offset = slot.block_table[position // self.block_size], position % self.block_size
                assert (block, offset) not in written, "two sequences write one token slot"
                written.add((block, offset))
                self.blocks[block][offset] = slot.tokens[position]
            known = range(slot.computed + 1, min(end + 1, slot.prompt_length))
            if known:
                positions = [prompt_logprob(slot.tokens, position) for position in known]
                prompt_logprobs.append(PromptLogprobs(slot=scheduled.slot, positions=positions))
            slot.computed = end
            self.computed_tokens += scheduled.num_tokens
            if end == len(slot.tokens):
                read = [
                    self.blocks[slot.block_table[position // self.block_size]][position % self.block_size]
                    for position in range(end)
                ]
                assert None not in read
                row = [value for value in read if value is not None]
                assert row == slot.tokens[:end], "the blocks hold something else than the sequence's tokens"
                rows[scheduled.slot] = row
                sampled.append(self._sample(scheduled.slot, row))
        for fork in command.forks:
            for target in fork.targets:
                self._join(target, self.slots[fork.source_slot].tokens[:-1])
                sampled.append(self._sample(target.slot, rows[fork.source_slot]))
        return ExecuteResponse(
            epoch=command.epoch, step=command.step, sampled=sampled, prompt_logprobs=prompt_logprobs
        )

    def _sample(self, index: int, row: list[int]) -> Sampled:
        slot = self.slots[index]
        banned = slot.stop_token_ids if len(row) < slot.min_length else frozenset[int]()
        token = next_token(row, slot.output_index, banned)
        slot.tokens.append(token)
        candidates = next_candidates(row, slot.num_candidates) if slot.num_candidates else []
        return Sampled(
            slot=index,
            token_id=token,
            candidates=[TokenLogprob(token_id=c.token_id, logprob=c.logprob) for c in candidates],
        )

    def _join(self, join: Join, tokens: Sequence[int] | None = None) -> None:
        assert join.slot not in self.slots
        assert join.slot < self.max_num_seqs
        self.slots[join.slot] = FakeSlot(
            list(join.token_ids if tokens is None else tokens),
            join.output_index,
            join.num_candidates,
            join.computed_length,
            list(join.block_ids),
            join.prompt_length if join.HasField("prompt_logprobs") else 0,
            frozenset(join.stop_token_ids),
            join.prompt_length + join.min_tokens,
        )
