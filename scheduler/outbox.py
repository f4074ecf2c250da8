"""What waits to be written to one router."""

import asyncio
from collections.abc import Iterator

from pagoda.scheduler.v1.scheduler_pb2 import (
    Load,
    RequestAccepted,
    RequestKey,
    RequestRefused,
    SequenceOutput,
    ServeResponse,
    StepOutputs,
)

# About a minute of a GPU's output to a router that reads nothing.
MAX_PENDING_TOKENS = 1_000_000


class Outbox:
    """Merges the messages to a router that reads slowly: at most one pending output per sequence.

    Within one flush, acceptances come first and refusals last, so that a request's messages stay in order.
    """

    def __init__(self) -> None:
        self._ready = asyncio.Event()
        self._accepted: list[RequestAccepted] = []
        self._refused: list[RequestRefused] = []
        self._outputs: dict[tuple[tuple[str, int], int], SequenceOutput] = {}
        self._load = Load()
        self._pending_tokens = 0
        self._extra: list[ServeResponse] = []

    @property
    def overflowing(self) -> bool:
        """The router has fallen too far behind; its stream should be dropped."""
        return self._pending_tokens > MAX_PENDING_TOKENS

    def accept(self, key: RequestKey) -> None:
        """The request is queued."""
        self._accepted.append(RequestAccepted(key=key))
        self._ready.set()

    def refuse(self, refusal: RequestRefused) -> None:
        """The request will produce nothing, or nothing more."""
        self._refused.append(refusal)
        self._ready.set()

    def add_output(self, key: tuple[tuple[str, int], int], output: SequenceOutput, num_tokens: int) -> None:
        """Tokens of one sequence, merged with those that still wait.

        `key` is the request's key and the output's index.
        """
        waiting = self._outputs.setdefault(key, output)
        if waiting is not output:
            waiting.MergeFrom(output)
        self._pending_tokens += num_tokens
        self._ready.set()

    def set_load(self, load: Load) -> None:
        """How busy the replica is; goes with the next outputs."""
        self._load = load

    def add_message(self, message: ServeResponse) -> None:
        """A message about the stream itself."""
        self._extra.append(message)
        self._ready.set()

    async def take(self) -> list[ServeResponse]:
        """Waits until something is pending and takes all of it."""
        await self._ready.wait()
        self._ready.clear()
        return list(self._drain())

    def _drain(self) -> Iterator[ServeResponse]:
        for accepted in self._accepted:
            yield ServeResponse(accepted=accepted)
        if self._outputs:
            yield ServeResponse(outputs=StepOutputs(sequences=self._outputs.values(), load=self._load))
        for refused in self._refused:
            yield ServeResponse(refused=refused)
        yield from self._extra
        self._accepted, self._refused, self._outputs, self._extra = [], [], {}, []
        self._pending_tokens = 0
