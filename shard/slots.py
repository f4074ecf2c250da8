"""What a shard holds of its running sequences, and how commands change it.

Parameters and lengths lie on the host, token ids and block tables on the device. A command is checked and
applied on the host at once; what it changes on the device is gathered, to be scattered into the tables.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from pagoda.shard.v1.shard_pb2 import ExecuteRequest, Fork, Join, Scheduled
from shard.constraints import Matcher
from shard.sampler import Bias, SamplingParams


class StepError(ValueError):
    """A command does not fit what the slots hold: scheduler and shard disagree, and the epoch must end."""


@dataclass(slots=True)
class Slot:
    """What the host knows of the sequence in a slot."""

    sampling: SamplingParams
    output_index: int
    num_candidates: int
    prompt_length: int
    length: int
    """Tokens, the last sampled one included."""
    computed: int
    """Tokens whose K and V are written."""
    bias: Bias | None = None
    early_bias: Bias | None = None
    """In the place of `bias` while stop tokens are not to be sampled."""
    min_length: int = 0
    """Tokens before which they aren't."""
    prompt_logprobs: int | None = None
    """How many likeliest tokens are wanted beside each of the prompt; None: no log-probabilities of it."""
    num_blocks: int = 0
    room: int = 0
    """How many tokens can be computed: they fit its blocks, and one more the longest length."""
    matcher: Matcher | None = None
    """Of what its constraint allows next."""

    def bias_at(self, position: int) -> Bias | None:
        """What is added to the logits of the token at a position."""
        return self.early_bias if position < self.min_length else self.bias


@dataclass(frozen=True)
class PromptChunk:
    """`count` tokens of a slot's prompt, from `position` on, whose log-probabilities a step makes known.

    `row`: of the token before the first of them. `width`: how many likeliest tokens are wanted beside each.
    """

    slot: int
    position: int
    count: int
    row: int
    width: int


@dataclass
class Step:
    """What a command computes. A row is a token's index among all tokens of the step."""

    slots: list[int] = field(default_factory=list)
    query_lens: list[int] = field(default_factory=list)
    seq_lens: list[int] = field(default_factory=list)
    num_tokens: int = 0
    sampling_slots: list[int] = field(default_factory=list)
    """Those whose last token is computed here; then the targets of forks."""
    next_positions: list[int] = field(default_factory=list)
    """Of the token that each of them samples."""
    rows: list[int] = field(default_factory=list)
    """Of the last token of each of them but for fork targets."""
    fork_rows: list[int] = field(default_factory=list)
    """If anything forks: for each of `sampling_slots` the index in `rows` of its logits."""
    fork_sources: list[int] = field(default_factory=list)
    fork_targets: list[int] = field(default_factory=list)
    prompt_chunks: list[PromptChunk] = field(default_factory=list)

    def pad(self, size: int | None) -> bool:
        """Adds sequences of length 0 up to `size` slots, if it is given; whether it is."""
        padding = [0] * (size - len(self.slots) if size else 0)
        self.slots += padding
        self.seq_lens += padding
        return size is not None


Numbers = Sequence[int] | np.ndarray


class Delta:
    """Few numbers, to be written into a table of so wide rows by flat index; the last for a place counts."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._numbers: dict[int, int] = {}

    def put(self, row: int, start: int, numbers: Sequence[int]) -> None:
        first = row * self._width + start
        self._numbers.update(zip(range(first, first + len(numbers)), numbers, strict=True))

    def take(self) -> tuple[list[int], list[int]]:
        """Indices and numbers; afterwards it is empty."""
        numbers, self._numbers = self._numbers, {}
        return [*numbers], [*numbers.values()]


class Joined:
    """Many numbers, each row's from its start on: the same as `Delta` for rows that are put once."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._rows: list[tuple[int, np.ndarray]] = []

    def put(self, row: int, numbers: Sequence[int]) -> None:
        self._rows.append((row * self._width, np.array(numbers)))

    def take(self) -> tuple[Numbers, Numbers]:
        """Indices and numbers; afterwards it is empty."""
        rows, self._rows = self._rows, []
        if not rows:
            return (), ()
        indices = [np.arange(first, first + len(numbers)) for first, numbers in rows]
        return np.concatenate(indices), np.concatenate([numbers for _, numbers in rows])


class Slots:
    """The slots of one shard, each empty or taken by a sequence."""

    def __init__(
        self,
        count: int,
        max_model_len: int,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        match: Callable[[Join], Matcher] | None = None,
    ) -> None:
        """`num_blocks`, each of `block_size` tokens, is the size of the pool.

        `match` gives a sequence with a constraint its matcher; a rank that doesn't sample has no use for one.
        """
        self._match = match
        self._max_model_len, self._num_blocks, self._block_size = max_model_len, num_blocks, block_size
        width = -(-max_model_len // block_size)
        self.token_ids = torch.zeros(count, max_model_len, dtype=torch.int32, device=device)
        self.block_tables = torch.zeros(count, width, dtype=torch.int32, device=device)
        # Overrides are to be written after the tokens that joined.
        self._joined, self._overrides, self._blocks = (
            Joined(max_model_len),
            Delta(max_model_len),
            Delta(width),
        )
        self._slots: dict[int, Slot] = {}

    def clear(self) -> None:
        """Empties all slots. What lies on the device is never read again."""
        self._slots = {}
        self.take_deltas()

    def take_deltas(self) -> tuple[Numbers, ...]:
        """What was applied since the last call: flat indices and numbers of `token_ids`, twice, for two
        scatters in this order; then of `block_tables`.
        """
        return *self._joined.take(), *self._overrides.take(), *self._blocks.take()

    def __getitem__(self, index: int) -> Slot:
        try:
            return self._slots[index]
        except KeyError:
            raise StepError(f"slot {index} is empty") from None

    def apply(self, command: ExecuteRequest) -> None:
        """Leaves, joins, block updates and overrides, in the order of the contract.

        Raises:
            StepError: the command contradicts the slots.
        """
        for index in command.leaves:
            self[index]
            del self._slots[index]
        for join in command.joins:
            length = len(join.token_ids)
            if not join.computed_length < length <= self._max_model_len:
                raise StepError(f"slot {join.slot}: {length} tokens, {join.computed_length} of them computed")
            self._take(join, length)
            if self._match and join.HasField("constraint"):
                self[join.slot].matcher = self._match(join)
            self._joined.put(join.slot, join.token_ids)
        for update in command.block_updates:
            self._update_blocks(update.slot, update.start, update.block_ids)
        for override in command.next_tokens:
            last = self[override.slot].length - 1
            self._overrides.put(override.slot, last, [override.token_id])

    def advance(self, scheduled: Sequence[Scheduled], forks: Sequence[Fork]) -> Step:
        """Counts the tokens of a step as computed, and those to be sampled as held; takes the slots of forks.

        Raises:
            StepError: a slot can't compute so many, or a fork contradicts the slots.
        """
        step = Step()
        for one in scheduled:
            index, count = one.slot, one.num_tokens
            slot = self[index]
            computed = slot.computed + count
            if not count or computed > slot.length or computed > slot.room:
                raise StepError(f"slot {index} can't compute {count} tokens: {slot}")
            if slot.prompt_logprobs is not None and slot.computed < slot.prompt_length - 1:
                first = slot.computed + 1
                known = min(computed + 1, slot.prompt_length) - first
                chunk = PromptChunk(index, first, known, step.num_tokens, slot.prompt_logprobs)
                step.prompt_chunks.append(chunk)
            slot.computed = computed
            step.slots.append(index)
            step.query_lens.append(count)
            step.seq_lens.append(computed)
            step.num_tokens += count
            if computed == slot.length:
                slot.length += 1
                step.sampling_slots.append(index)
                step.next_positions.append(computed)
                step.rows.append(step.num_tokens - 1)
        if forks:
            self._fork(forks, step)
        return step

    def _fork(self, forks: Sequence[Fork], step: Step) -> None:
        rows = {slot: row for row, slot in enumerate(step.sampling_slots)}
        step.fork_rows = [*rows.values()]
        for fork in forks:
            source = fork.source_slot
            if source not in rows:
                raise StepError(f"slot {source} is to be forked and does not sample in this step")
            position = step.next_positions[rows[source]]
            matcher = self[source].matcher
            for target in fork.targets:
                self._take(target, position + 1)
                self[target.slot].matcher = matcher and matcher.fork()
                step.fork_rows.append(rows[source])
                step.fork_sources.append(source)
                step.fork_targets.append(target.slot)
                step.next_positions.append(position)
        step.sampling_slots += step.fork_targets

    def _take(self, join: Join, length: int) -> None:
        if join.slot in self._slots or join.slot >= len(self.token_ids):
            raise StepError(f"slot {join.slot} is taken or not below {len(self.token_ids)}")
        params = join.sampling
        logprobs = params.logprobs if params.HasField("logprobs") else None
        if join.num_candidates:
            logprobs = join.num_candidates
        biases = dict(params.logit_bias)
        bias = self._bias(biases)
        banned = dict.fromkeys(join.stop_token_ids, -math.inf) if join.min_tokens else {}
        self._slots[join.slot] = Slot(
            sampling=SamplingParams(
                temperature=params.temperature,
                top_p=params.top_p,
                top_k=params.top_k,
                min_p=params.min_p,
                presence_penalty=params.presence_penalty,
                frequency_penalty=params.frequency_penalty,
                repetition_penalty=params.repetition_penalty,
                seed=params.seed,
                logprobs=logprobs,
            ),
            output_index=join.output_index,
            num_candidates=join.num_candidates,
            prompt_length=join.prompt_length,
            length=length,
            computed=join.computed_length,
            bias=bias,
            early_bias=self._bias(biases | banned) if banned else bias,
            min_length=join.prompt_length + join.min_tokens,
            prompt_logprobs=join.prompt_logprobs if join.HasField("prompt_logprobs") else None,
        )
        self._update_blocks(join.slot, 0, join.block_ids)

    def _bias(self, biases: dict[int, float]) -> Bias | None:
        device = self.token_ids.device
        if not biases:
            return None
        return Bias(torch.tensor([*biases], device=device), torch.tensor([*biases.values()], device=device))

    def _update_blocks(self, index: int, start: int, block_ids: Sequence[int]) -> None:
        slot, end = self[index], start + len(block_ids)
        in_pool = max(block_ids, default=0) < self._num_blocks
        if start > slot.num_blocks or end > self.block_tables.shape[1] or not in_pool:
            raise StepError(f"slot {index}: blocks {list(block_ids)} from {start} on don't fit {slot}")
        self._blocks.put(index, start, block_ids)
        slot.num_blocks = end
        slot.room = min(end * self._block_size, self._max_model_len - 1)
