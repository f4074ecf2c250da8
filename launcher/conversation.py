"""A chat's messages, and which of them still fit."""

from collections.abc import Callable

from pagoda.v1 import inference_pb2 as pb

# Of the context, at most this part is kept free for an answer whose length was not given.
ROOM_FOR_ANSWER = 0.25


class DoesNotFitError(Exception):
    """The newest message alone, with the system message, exceeds the context."""


class Conversation:
    """Messages in turns of user and assistant, after an optional system message."""

    def __init__(self, system: str | None = None) -> None:
        self._system = [pb.ChatMessage(role="system", content=system)] if system else []
        self._turns: list[pb.ChatMessage] = []

    @property
    def messages(self) -> list[pb.ChatMessage]:
        """What the model is to see, oldest first."""
        return [*self._system, *self._turns]

    def ask(self, content: str) -> None:
        """Adds what the user says. Bytes that are no UTF-8 become question marks."""
        text = content.encode(errors="replace").decode()
        self._turns.append(pb.ChatMessage(role="user", content=text))

    def answer(self, content: str) -> None:
        """Adds what the model said; with nothing said, takes the question back."""
        if content:
            self._turns.append(pb.ChatMessage(role="assistant", content=content))
        else:
            self._turns.pop()

    def reset(self) -> None:
        """Forgets everything but the system message."""
        self._turns.clear()

    def trim(
        self, count_tokens: Callable[[list[pb.ChatMessage]], int], context: int, max_tokens: int | None
    ) -> int:
        """Forgets the oldest turns until prompt and answer fit into `context` tokens; says how many messages.

        Raises:
            DoesNotFitError: the last message can't fit.
        """
        room = int(context * ROOM_FOR_ANSWER) if max_tokens is None else max_tokens
        forgotten = 0
        while (prompt := count_tokens(self.messages)) + room > context:
            if len(self._turns) == 1:
                raise DoesNotFitError(
                    f"the message makes {prompt} tokens; with {room} for the answer, {context} don't hold it"
                )
            del self._turns[:2]
            forgotten += 2
        return forgotten
