"""A shard without a model: it keeps tokens in blocks where a real one keeps K and V.

Its next token is a hash of what it reads through the block table, so a block given out too early, written by
two sequences or missing from a table changes the output.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from pagoda.shard.v1.shard_pb2 import ConfigureRequest, ExecuteRequest, ExecuteResponse, Join, Sampled

VOCAB_SIZE = 1000


def next_token(tokens: Sequence[int]) -> int:
    """What the "model" says after `tokens`."""
    value = 17
    for token in tokens:
        value = (value * 31 + token + 1) % 1_000_003
    return value % VOCAB_SIZE


def expected_output(prompt: Sequence[int], max_tokens: int, stop: frozenset[int] = frozenset()) -> list[int]:
    """The output of a request that runs alone, with unlimited memory."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        tokens.append(next_token(tokens))
        if tokens[-1] in stop:
            break
    return tokens[len(prompt) :]


@dataclass
class FakeSlot:
    tokens: list[int]
    computed: int = 0
    block_table: list[int] = field(default_factory=list)


class FakeShard:
    """Executes commands strictly in order, and checks each against the contract."""

    def __init__(
        self, num_blocks: int, block_size: int, max_num_seqs: int, max_num_batched_tokens: int
    ) -> None:
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.blocks: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.slots: dict[int, FakeSlot] = {}
        self.computed_tokens = 0
        self.next_step = 0

    @classmethod
    def configured(cls, request: ConfigureRequest) -> "FakeShard":
        return cls(
            request.num_blocks, request.block_size, request.max_num_seqs, request.max_num_batched_tokens
        )

    def execute(self, command: ExecuteRequest) -> ExecuteResponse:
        for leaving in command.leaves:
            del self.slots[leaving]
        for join in command.joins:
            self._join(join)
        for append in command.appends:
            self.slots[append.slot].block_table += append.block_ids
        assert sum(s.num_tokens for s in command.scheduled) <= self.max_num_batched_tokens
        assert len({s.slot for s in command.scheduled}) == len(command.scheduled), "a slot twice in one step"

        written: set[tuple[int, int]] = set()
        sampled = []
        for scheduled in command.scheduled:
            slot = self.slots[scheduled.slot]
            end = slot.computed + scheduled.num_tokens
            assert slot.computed < end <= len(slot.tokens)
            for position in range(slot.computed, end):
                block, offset = slot.block_table[position // self.block_size], position % self.block_size
                assert (block, offset) not in written, "two sequences write one token slot"
                written.add((block, offset))
                self.blocks[block][offset] = slot.tokens[position]
            slot.computed = end
            self.computed_tokens += scheduled.num_tokens
            if end == len(slot.tokens):
                read = [
                    self.blocks[slot.block_table[position // self.block_size]][position % self.block_size]
                    for position in range(end)
                ]
                token = next_token([-1 if value is None else value for value in read])
                slot.tokens.append(token)
                sampled.append(Sampled(slot=scheduled.slot, token_id=token))
        return ExecuteResponse(epoch=command.epoch, step=command.step, sampled=sampled)

    def _join(self, join: Join) -> None:
        assert join.slot not in self.slots
        assert join.slot < self.max_num_seqs
        self.slots[join.slot] = FakeSlot(list(join.token_ids), join.computed_length, list(join.block_ids))
