"""A request and its sequences, as the scheduler knows them."""

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field

from pagoda.scheduler.v1.scheduler_pb2 import Submit
from pagoda.v1.sampling_pb2 import PositionLogprobs
from scheduler.beam_search import BeamSearch, Candidate
from scheduler.block_hash import block_hash
from scheduler.outbox import Outbox
from scheduler.request_trace import RequestTrace


class State(enum.Enum):
    """Where a sequence is. Paused ones wait too: they are ranked with the rest."""

    WAITING = enum.auto()
    # Has no tokens of its own yet: becomes a copy of its request's leader when that has computed the prompt.
    FORKING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


@dataclass(eq=False)
class Sequence:
    """One token stream of a request.

    `num_computed` counts tokens whose K and V are computed by the commands sent so far. `num_pending`
    counts tokens that those commands sample and whose values have not come back: they are on the shard,
    so the next step can build on them. A running sequence's blocks are in `block_table`; a swapped-out
    one's are in `host_table`; else both are empty.
    """

    request: "Request"
    output_index: int
    token_ids: list[int]
    max_length: int
    state: State = State.WAITING
    slot: int = -1
    # The shard knows the slot as this sequence's.
    joined: bool = False
    block_table: list[int] = field(default_factory=list)
    host_table: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_pending: int = 0
    # Of the full blocks of `token_ids`, and how many of them the device pool was told of.
    block_hashes: list[bytes] = field(default_factory=list)
    num_registered: int = 0
    # Prompt tokens that the first admission found in the prefix cache.
    cached_tokens: int | None = None
    # Whether the router is still to be told of them.
    reports_cached: bool = False
    # Of a beam: what may come next, until the other beams have theirs; then what does, if the shard must
    # be told.
    candidates: list[Candidate] | None = None
    next_token: int | None = None
    # The first prompt token whose log-probability is still to be reported; 0: none is. Of a request's
    # sequences, one reports them.
    next_prompt_logprob: int = 0

    @property
    def handle(self) -> int:
        """What the router knows it by."""
        return self.request.number << 8 | self.output_index

    @property
    def begins(self) -> bool:
        """Whether its output holds no more than its first token."""
        return len(self.token_ids) <= self.request.prompt_length + 1

    @property
    def length(self) -> int:
        """Tokens that the shard knows once the commands sent so far are done."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_uncomputed(self) -> int:
        """Tokens to compute before the next one can be sampled; 1 while decoding."""
        return self.length - self.num_computed

    @property
    def runnable(self) -> bool:
        """Whether a further token is wanted, as far as is known before pending ones come back.

        Beams wait for each result, which decides who goes on.
        """
        if self.request.beams and (self.num_pending or self.candidates is not None):
            return False
        return self.length < self.max_length

    @property
    def decoding(self) -> bool:
        """Whether the next step computes just the token that was sampled last."""
        return self.num_uncomputed == 1

    @property
    def max_prefix(self) -> int:
        """Tokens at its beginning that needn't be computed where their K and V are found.

        Computing a token gives what comes after it: a sample, or the log-probability of a prompt's token.
        """
        return self.next_prompt_logprob - 1 if self.next_prompt_logprob else self.length - 1

    @property
    def logprobs_per_prompt_token(self) -> int:
        """How many log-probabilities each of its prompt's tokens has to report."""
        return 1 + self.request.submit.prompt_logprobs if self.next_prompt_logprob else 0

    def take_prompt_logprobs(
        self, start: int, positions: Iterable[PositionLogprobs]
    ) -> list[PositionLogprobs]:
        """Of the log-probabilities of the prompt's tokens after `start`, those that weren't reported yet."""
        first = self.next_prompt_logprob
        if not first or self.state is State.FINISHED:
            return []
        unreported = list(positions)[first - start - 1 :]
        first += len(unreported)
        self.next_prompt_logprob = first if first < self.request.prompt_length else 0
        return unreported

    def hash_blocks(self, block_size: int) -> None:
        """Hashes the blocks that became full since the last call."""
        parent = self.block_hashes[-1] if self.block_hashes else self.request.root_hash
        for start in range(len(self.block_hashes) * block_size, len(self.token_ids), block_size):
            if start + block_size > len(self.token_ids):
                break
            parent = block_hash(parent, self.token_ids[start : start + block_size])
            self.block_hashes.append(parent)


@dataclass(eq=False)
class Request:
    """What a router submitted.

    `key` is (request id, attempt), unique within the router's stream. `rank` orders requests: (priority,
    arrival on this process's monotonic clock in seconds, submission number), lower ones first.
    """

    key: tuple[str, int]
    outbox: Outbox
    submit: Submit
    rank: tuple[int, float, int]
    stop_token_ids: frozenset[int]
    root_hash: bytes
    sequences: list[Sequence] = field(default_factory=list)
    beams: BeamSearch | None = None
    # Keeps time, if the request is traced.
    trace: RequestTrace | None = None
    failed_steps: int = 0
    # Waits for the shard to know its constraint; others pass it meanwhile.
    preparing: bool = False
    # Since the last of them, if it is suspected: steps that went well.
    steps_alone: int = 0
    # Slots set aside for it while any of its sequences runs.
    claim: int = 0
    # Tokens of the prompt; outputs come after them.
    prompt_length: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_length = len(self.submit.prompt_token_ids)

    @property
    def arrival(self) -> float:
        """When it came to its router, on this process's monotonic clock in seconds."""
        return self.rank[1]

    @property
    def number(self) -> int:
        """The how manieth submission it is."""
        return self.rank[2]

    @property
    def demand(self) -> int:
        """Slots that it may come to need at once."""
        if self.beams:
            return self.beams.width
        return sum(sequence.state is not State.FINISHED for sequence in self.sequences)

    @property
    def running(self) -> list[Sequence]:
        """Its sequences that hold slots."""
        return [sequence for sequence in self.sequences if sequence.state is State.RUNNING]

    @property
    def forking(self) -> list[Sequence]:
        """Its sequences that wait for the prompt to be computed."""
        return [sequence for sequence in self.sequences if sequence.state is State.FORKING]

    @property
    def finished(self) -> bool:
        """Whether every output has ended."""
        return all(sequence.state is State.FINISHED for sequence in self.sequences)
