"""Outputs become the responses that a gateway expects."""

from collections.abc import Iterable
from typing import Any

import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb

from common.model_files import ModelFiles
from common.tokenizer import Tokenizer
from pagoda.scheduler.v1.scheduler_pb2 import SequenceOutput, StepOutputs
from pagoda.v1.inference_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP
from pagoda.v1.sampling_pb2 import PositionLogprobs, TokenLogprob
from scheduler.gateway.answer import Answer
from tests.router.models import write_model
from tests.scheduler.gateway.asking import ask


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(ModelFiles.read(write_model(tmp_path_factory.mktemp("models") / "tiny")))


class Case:
    """An answer, and which of its outputs the engine was told to end."""

    def __init__(self, tokenizer: Tokenizer, request: pb.GenerateRequest, n: int = 1) -> None:
        self.ended: list[int] = []
        self.answer = Answer(request, n, tokenizer.detokenizer, self.ended.append)

    def take(self, *sequences: SequenceOutput, tokens: Iterable[tuple[int, int]] = ()) -> list[Any]:
        """`tokens` are plain ones: (output index, token id)."""
        pairs = list(tokens)
        outputs = StepOutputs(
            handles=[77 << 8 | index for index, _ in pairs],
            token_ids=[token_id for _, token_id in pairs],
            sequences=sequences,
        )
        return list(self.answer.take(outputs))


def position(token_id: int, logprob: float, *top: tuple[int, float]) -> PositionLogprobs:
    return PositionLogprobs(
        chosen=TokenLogprob(token_id=token_id, logprob=logprob),
        top=[TokenLogprob(token_id=one, logprob=value) for one, value in top],
    )


def test_a_stream_has_a_chunk_for_what_arrived_and_ends_with_the_reason(tokenizer: Tokenizer) -> None:
    case = Case(tokenizer, ask([5, 6, 7], stream=True))

    (first,) = case.take(SequenceOutput(token_ids=[10], cached_tokens=2))
    (second,) = case.take(tokens=[(0, 11)])
    last, end = case.take(SequenceOutput(token_ids=[12, 13], finish_reason=FINISH_REASON_LENGTH))

    assert [list(one.chunk.token_ids) for one in (first, second, last)] == [[10], [11], [12, 13]]
    assert {(one.chunk.prompt_tokens, one.chunk.cached_tokens) for one in (first, second, last)} == {(3, 2)}
    assert (end.complete.finish_reason, end.complete.completion_tokens) == ("length", 4)
    assert case.answer.finished


def test_a_whole_answer_has_each_output_once_as_it_ends(tokenizer: Tokenizer) -> None:
    case = Case(tokenizer, ask([5, 6, 7]), n=2)

    assert case.take(tokens=[(0, 10), (1, 20)]) == []
    (second,) = case.take(
        SequenceOutput(output_index=1, token_ids=[21], finish_reason=FINISH_REASON_STOP), tokens=[(0, 11)]
    )
    assert not case.answer.finished
    (first,) = case.take(SequenceOutput(token_ids=[12], finish_reason=FINISH_REASON_LENGTH))

    assert (second.complete.index, list(second.complete.output_ids)) == (1, [20, 21])
    assert (first.complete.index, list(first.complete.output_ids)) == (0, [10, 11, 12])
    assert (first.complete.completion_tokens, second.complete.completion_tokens) == (3, 2)
    assert (first.complete.finish_reason, second.complete.finish_reason) == ("length", "stop")
    assert case.answer.finished


@pytest.mark.parametrize(("last", "matched"), [(9, True), (1, False)])
def test_a_stop_token_is_named_if_it_was_the_client_s(tokenizer: Tokenizer, last: int, matched: bool) -> None:
    case = Case(tokenizer, ask([5], stop_token_ids=[9]))

    (end,) = case.take(SequenceOutput(token_ids=[last], finish_reason=FINISH_REASON_STOP))

    assert end.complete.WhichOneof("matched_stop") == ("matched_token_id" if matched else None)


@pytest.mark.parametrize("top", [0, 2])
def test_log_probabilities_of_outputs_are_those_of_their_tokens(tokenizer: Tokenizer, top: int) -> None:
    case = Case(tokenizer, ask([5], logprobs=top))
    alternatives = [(11, -0.25), (10, -0.5)][:top]
    logprobs = [position(10, -0.5, *alternatives)]

    (end,) = case.take(SequenceOutput(token_ids=[10], logprobs=logprobs, finish_reason=FINISH_REASON_LENGTH))

    given = end.complete.output_logprobs
    assert (given.token_ids, given.token_logprobs) == ([10], [-0.5])
    assert [list(one.token_ids) for one in given.top_logprobs] == ([[11, 10]] if top else [])


def test_log_probabilities_of_the_prompt_come_once_and_whole_with_the_first_token(
    tokenizer: Tokenizer,
) -> None:
    case = Case(tokenizer, ask([5, 6, 7], stream=True, prompt_logprobs=1))

    assert case.take(SequenceOutput(prompt_logprobs=[position(6, -1, (8, -0.5))])) == []
    (first,) = case.take(SequenceOutput(token_ids=[10], prompt_logprobs=[position(7, -2, (7, -2))]))
    (second,) = case.take(tokens=[(0, 11)])

    given = first.chunk.input_logprobs
    assert given.token_ids == [5, 6, 7]
    assert [one.value if one.HasField("value") else None for one in given.token_logprobs] == [None, -1, -2]
    assert [list(one.token_ids) for one in given.top_logprobs] == [[], [8], [7]]
    assert not second.chunk.HasField("input_logprobs")


def test_a_stop_string_ends_its_output_and_what_comes_after_is_dropped(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("The quick brown fox", add_special_tokens=False)
    stop = tokenizer.decode(ids[1:3])[1:]
    case = Case(tokenizer, ask([5], stop=[stop]), n=2)

    (end,) = case.take(tokens=[(0, token_id) for token_id in ids])
    assert case.take(tokens=[(0, ids[0])]) == []

    assert list(end.complete.output_ids) == ids[:3]
    assert (end.complete.finish_reason, end.complete.matched_stop_str) == ("stop", stop)
    assert case.ended == [0]
    assert not case.answer.finished


def test_stop_strings_don_t_count_before_min_tokens(tokenizer: Tokenizer) -> None:
    (letter,) = tokenizer.encode("x", add_special_tokens=False)
    case = Case(tokenizer, ask([5], stop=["x"], min_tokens=3))

    (end,) = case.take(tokens=[(0, letter)] * 6)

    assert end.complete.completion_tokens == 4
