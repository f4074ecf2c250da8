"""A conversation forgets its oldest turns when they no longer fit, and never its system message."""

import pytest

from launcher.conversation import Conversation, DoesNotFitError
from pagoda.v1 import inference_pb2 as pb


def words(messages: list[pb.ChatMessage]) -> int:
    return sum(len(message.content.split()) for message in messages)


def contents(conversation: Conversation) -> list[str]:
    return [message.content for message in conversation.messages]


@pytest.fixture
def conversation() -> Conversation:
    made = Conversation(system="be kind")
    for turn in ("one", "two"):
        made.ask(turn + " question")
        made.answer(turn + " answer")
    made.ask("three question")
    return made


def test_what_fits_is_kept(conversation: Conversation) -> None:
    assert conversation.trim(words, context=100, max_tokens=88) == 0


def test_the_oldest_turn_is_forgotten_first(conversation: Conversation) -> None:
    assert conversation.trim(words, context=100, max_tokens=90) == 2
    assert contents(conversation) == ["be kind", "two question", "two answer", "three question"]


def test_a_quarter_is_kept_for_an_answer_of_unknown_length(conversation: Conversation) -> None:
    assert conversation.trim(words, context=12, max_tokens=None) == 2


def test_a_message_that_can_not_fit_says_so(conversation: Conversation) -> None:
    with pytest.raises(DoesNotFitError, match="the message makes 4 tokens; with 97 for the answer, 100"):
        conversation.trim(words, context=100, max_tokens=97)


def test_a_question_without_an_answer_is_taken_back(conversation: Conversation) -> None:
    conversation.answer("")

    assert contents(conversation)[-1] == "two answer"


def test_reset_keeps_the_system_message(conversation: Conversation) -> None:
    conversation.reset()

    assert contents(conversation) == ["be kind"]


def test_bytes_that_are_no_utf8_can_be_sent() -> None:
    conversation = Conversation()
    conversation.ask("caf\udce9")

    assert contents(conversation) == ["caf?"]
