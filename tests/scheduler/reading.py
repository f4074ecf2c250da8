"""What a router makes of a scheduler's messages."""

from collections.abc import Iterator

from pagoda.scheduler.v1.scheduler_pb2 import RequestKey, SequenceOutput, ServeResponse


class OutputReader:
    """Turns plain tokens into outputs like the others, in order."""

    def __init__(self) -> None:
        self._keys: dict[int, RequestKey] = {}

    def read(self, message: ServeResponse) -> Iterator[SequenceOutput]:
        """Every output in a message."""
        if message.HasField("accepted"):
            assert message.accepted.number not in self._keys
            self._keys[message.accepted.number] = message.accepted.key
        outputs = message.outputs
        for handle, token_id in zip(outputs.handles, outputs.token_ids, strict=True):
            yield SequenceOutput(
                key=self._keys[handle >> 8], output_index=handle & 0xFF, token_ids=[token_id]
            )
        yield from outputs.sequences
