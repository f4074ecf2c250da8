"""What can never fit the pool is refused with the field at fault and the most that would fit."""

import pytest

from scheduler.admission import RefusedError, make_request
from scheduler.outbox import Outbox
from scheduler.request import Request
from tests.scheduler.fake_shard import VOCAB_SIZE
from tests.scheduler.harness import limits, submit


def admit(prompt_length: int, max_tokens: int = 0, n: int = 1, beam_width: int = 0) -> Request:
    """In a pool of 8 blocks of 4 tokens."""
    message = submit("a", [1] * prompt_length, max_tokens, n=n, beam_width=beam_width)
    return make_request(message, Outbox(), limits(num_blocks=8, max_num_seqs=16), "", (0, 0))


def test_more_tokens_at_least_than_fit_are_refused() -> None:
    lim = limits(num_blocks=8)
    make_request(submit("a", [1] * 5, min_tokens=28), Outbox(), lim, "", (0, 0))

    with pytest.raises(RefusedError, match="29 is above the 28 tokens that fit") as refused:
        make_request(submit("a", [1] * 5, min_tokens=29), Outbox(), lim, "", (0, 0))

    assert refused.value.field == "spec.stop.min_tokens"


def test_tokens_outside_the_vocabulary_are_kept_from_the_shard() -> None:
    """There they would be those of another row."""
    biased, banning = submit("a", [1]), submit("a", [1], stop=[VOCAB_SIZE], min_tokens=1)
    biased.sampling.logit_bias[VOCAB_SIZE] = 1

    for message in (biased, banning):
        with pytest.raises(RefusedError, match=f"{VOCAB_SIZE} is not below the vocabulary"):
            make_request(message, Outbox(), limits(), "", (0, 0))


@pytest.mark.parametrize(
    ("n", "beam_width", "field"),
    [(2, 12, "spec.beam_search.beam_width"), (12, 0, "spec.n"), (12, 12, "spec.n")],
)
def test_more_sequences_than_fit_are_at_fault_themselves(n: int, beam_width: int, field: str) -> None:
    with pytest.raises(RefusedError, match="12 sequences with a prompt of 5 tokens") as refused:
        admit(5, 1, n, beam_width)

    assert refused.value.field == field


@pytest.mark.parametrize(
    # An output's last token needs no slot.
    ("prompt_length", "max_tokens", "widest"),
    [(5, 0, 7), (5, 1, 7), (5, 4, 7), (5, 5, 3), (30, 3, 1)],
)
def test_as_many_sequences_as_are_offered_fit(prompt_length: int, max_tokens: int, widest: int) -> None:
    with pytest.raises(RefusedError, match=f"ask for at most {widest}$"):
        admit(prompt_length, max_tokens, 12)

    admit(prompt_length, max_tokens, widest)
    if max_tokens > 0:
        with pytest.raises(RefusedError):
            admit(prompt_length, max_tokens, widest + 1)


@pytest.mark.parametrize(("prompt_length", "widest"), [(5, 7), (30, 1)])
def test_an_output_too_long_for_one_sequence_is_left_for_the_next_refusal(
    prompt_length: int, widest: int
) -> None:
    with pytest.raises(RefusedError, match=f"ask for at most {widest}$"):
        admit(prompt_length, 99, 12)

    with pytest.raises(RefusedError) as refused:
        admit(prompt_length, 99, widest)
    assert refused.value.field == "spec.stop.max_tokens"


@pytest.mark.parametrize("n", [1, 12])
def test_a_prompt_that_not_even_one_sequence_can_hold_is_at_fault(n: int) -> None:
    with pytest.raises(RefusedError, match=r"33 tokens; the whole KV pool holds 32$") as refused:
        admit(33, 1, n)

    assert refused.value.field == "spec.prompt"
