"""What waits to be written to one router."""

import asyncio
from collections.abc import Iterator
from typing import Final

from common.rpc import MAX_MESSAGE_BYTES
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
# Of one message with several outputs; an output's log-probabilities alone may take more.
MAX_OUTPUTS_BYTES: Final = MAX_MESSAGE_BYTES // 2


class _Tokens:
    """Tokens that wait, of sequences by their handles."""

    def __init__(self) -> None:
        self._outputs: dict[int, SequenceOutput] = {}
        self._handles: list[int] = []
        self._token_ids: list[int] = []

    def add_token(self, handle: int, token_id: int) -> None:
        waiting = self._outputs.get(handle)
        if waiting is None:
            self._handles.append(handle)
            self._token_ids.append(token_id)
        else:
            waiting.token_ids.append(token_id)

    def add_output(self, handle: int, output: SequenceOutput) -> None:
        waiting = self._outputs.setdefault(handle, output)
        if waiting is not output:
            waiting.MergeFrom(output)

    def drain(self, load: Load) -> Iterator[ServeResponse]:
        """One message, or several where log-probabilities would make it too large for gRPC."""
        if not (self._outputs or self._handles):
            return
        outputs = StepOutputs(handles=self._handles, token_ids=self._token_ids, load=load)
        size = outputs.ByteSize()
        for output in self._outputs.values():
            added = output.ByteSize()
            if size + added > MAX_OUTPUTS_BYTES:
                yield ServeResponse(outputs=outputs)
                outputs, size = StepOutputs(load=load), 0
            outputs.sequences.append(output)
            size += added
        yield ServeResponse(outputs=outputs)
        self._outputs, self._handles, self._token_ids = {}, [], []


class Outbox:
    """Merges the messages to a router that reads slowly, up to a bound.

    Within one flush, acceptances come first and refusals last, plain tokens before other outputs, so that a
    request's messages stay in order. What begins outputs comes before all that goes on: its clients wait
    longest. A sequence's handle is its request's number << 8 | its output index.
    """

    def __init__(self) -> None:
        self._ready = asyncio.Event()
        self._accepted: list[RequestAccepted] = []
        self._refused: list[RequestRefused] = []
        self._first_tokens = _Tokens()
        self._tokens = _Tokens()
        self._load = Load()
        self._pending_tokens = 0
        self._extra: list[ServeResponse] = []

    @property
    def overflowing(self) -> bool:
        """The router has fallen too far behind; its stream should be dropped."""
        return self._pending_tokens > MAX_PENDING_TOKENS

    def accept(self, key: RequestKey, number: int) -> None:
        """The request is queued."""
        self._accepted.append(RequestAccepted(key=key, number=number))
        self._ready.set()

    def refuse(self, refusal: RequestRefused) -> None:
        """The request will produce nothing, or nothing more."""
        self._refused.append(refusal)
        self._ready.set()

    def add_token(self, handle: int, token_id: int, *, begins: bool = False) -> None:
        """A plain token of the sequence with this handle. Not sent before `flush`.

        `begins`: of what this sequence puts out, nothing went another way before.
        """
        (self._first_tokens if begins else self._tokens).add_token(handle, token_id)
        self._pending_tokens += 1

    def add_output(self, handle: int, output: SequenceOutput, *, begins: bool = False) -> None:
        """Any output of the sequence with this handle. Not sent before `flush`; for `begins` see above."""
        (self._first_tokens if begins else self._tokens).add_output(handle, output)
        self._pending_tokens += len(output.token_ids) + len(output.prompt_logprobs)

    def flush(self, load: Load) -> None:
        """Lets the outputs go, with how busy the replica is."""
        self._load = load
        self._ready.set()

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
        yield from self._first_tokens.drain(self._load)
        yield from self._tokens.drain(self._load)
        for refused in self._refused:
            yield ServeResponse(refused=refused)
        yield from self._extra
        self._accepted, self._refused, self._extra = [], [], []
        self._pending_tokens = 0
