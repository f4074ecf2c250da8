from pathlib import Path
from typing import Any

import pytest

from common.model_files import ModelFiles
from common.tokenizer import Tokenizer
from pagoda.scheduler.v1.scheduler_pb2 import SequenceOutput
from pagoda.v1.sampling_pb2 import PositionLogprobs, SamplingParams, TokenLogprob
from router.discovery import Discovery
from router.generation import Generation
from router.output import Output
from router.replicas import Replicas
from router.validation import Request
from tests.router.fake_scheduler import LENGTH, STOP
from tests.router.models import byte_level_bpe

TOKENIZER = byte_level_bpe()


def request(*stop_strings: str, min_tokens: int = 0) -> Request:
    return Request(
        request_id="a",
        model="tiny",
        prompt_token_ids=(5,),
        sampling=SamplingParams(seed=1),
        max_tokens=0,
        min_tokens=min_tokens,
        stop_strings=stop_strings,
        include_stop_string=False,
        stop_token_ids=frozenset({1}),
    )


def arrived(token_ids: list[int], finish: Any = 0) -> SequenceOutput:
    logprobs = [PositionLogprobs(chosen=TokenLogprob(token_id=token_id)) for token_id in token_ids]
    return SequenceOutput(token_ids=token_ids, finish_reason=finish, logprobs=logprobs)


@pytest.fixture(scope="module")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer(ModelFiles.read(model_folder))


def test_part_of_a_stop_string_is_released_at_the_end(tokenizer: Tokenizer) -> None:
    output = Output(0, request("wastes"), tokenizer.detokenizer())
    held = output.add(arrived(TOKENIZER.encode("is wast").ids))
    last = output.add(arrived([1], STOP))
    assert (held.text, last.text) == ("is ", "wast")
    assert (last.finish_reason, last.stop_token_id) == (STOP, 1)


@pytest.mark.parametrize(
    # The tokens are n, ot, hing, is, wasted; a stop string begins in the third and ends in the fourth.
    ("min_tokens", "text"),
    [(0, "noth"), (3, "noth"), (4, "nothing is "), (5, "nothing is wasted")],
)
def test_a_stop_string_counts_if_it_ends_after_the_first_tokens(
    tokenizer: Tokenizer, min_tokens: int, text: str
) -> None:
    output = Output(0, request("ing is", "wasted", min_tokens=min_tokens), tokenizer.detokenizer())

    delta = output.add(arrived([*TOKENIZER.encode("nothing is wasted").ids, 1], STOP))

    assert delta.text == text


def test_half_a_character_is_replaced_at_the_end(tokenizer: Tokenizer) -> None:
    output = Output(0, request(), tokenizer.detokenizer())
    assert output.add(arrived(TOKENIZER.encode("ok🙂").ids[:-1], LENGTH)).text == "ok�"
    assert output.finished


def test_prior_tokens_are_among_the_first(tokenizer: Tokenizer) -> None:
    *prior, last = TOKENIZER.encode("nothing is wasted").ids
    output = Output(0, request("ing is", "wasted", min_tokens=4), tokenizer.detokenizer())
    output.prime(prior, finished=False)

    delta = output.add(arrived([last]))

    assert (delta.finish_reason, delta.stop_string) == (STOP, "wasted")


async def test_what_nobody_took_yet_is_merged_into_one() -> None:
    generation = Generation(request(), Replicas(Discovery([])), reconnect_timeout=0)
    for token_ids, finish in (([5], 0), ([6, 7], 0), ([1], STOP)):
        generation.on_output(arrived(token_ids, finish))
    assert await generation.take() == [arrived([5, 6, 7, 1], STOP)]
    assert await generation.take() == []
