"""A request and its sequences, as the scheduler knows them."""

import enum
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from pagoda.scheduler.v1.scheduler_pb2 import Submit
from scheduler.outbox import Outbox


class State(enum.Enum):
    """Where a sequence is. Paused ones wait too: they are ranked by arrival with the rest."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


@dataclass(eq=False)
class Sequence:
    """One token stream of a request.

    `num_computed` counts tokens whose K and V are computed by the commands sent so far. `num_pending`
    counts tokens that those commands sample and whose values have not come back: they are on the shard,
    so the next step can build on them.
    """

    request: "Request"
    output_index: int
    token_ids: list[int]
    max_length: int
    state: State = State.WAITING
    slot: int = -1
    block_table: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_pending: int = 0

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
        """Whether a further token is wanted, as far as is known before pending ones come back."""
        return self.length < self.max_length

    @property
    def decoding(self) -> bool:
        """Whether the next step computes just the token that was sampled last."""
        return self.num_uncomputed == 1


@dataclass(eq=False)
class Request:
    """What a router submitted.

    `key` is (request id, attempt), unique within the router's stream. `rank` orders requests: (arrival on
    this process's monotonic clock in seconds, submission number).
    """

    key: tuple[str, int]
    outbox: Outbox
    submit: Submit
    rank: tuple[float, int]
    stop_token_ids: frozenset[int]
    sequences: Items[Sequence] = ()
    failed_steps: int = 0

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt; outputs come after them."""
        return len(self.submit.prompt_token_ids)

    @property
    def finished(self) -> bool:
        """Whether every output has ended."""
        return all(sequence.state is State.FINISHED for sequence in self.sequences)
