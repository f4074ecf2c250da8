"""A GenerateRequest means what it means to vLLM."""

import math
from typing import Any

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb

from pagoda.scheduler.v1.scheduler_pb2 import Submit
from pagoda.v1.inference_pb2 import Choices, Constraint
from scheduler.admission import RefusedError
from scheduler.gateway.submission import make_submit
from tests.scheduler.gateway.asking import ask
from tests.scheduler.harness import limits

EOS = (1, 2)


def submit(**params: Any) -> Submit:
    return make_submit(ask([5, 6], **params), EOS, limits(max_model_len=100))


def refusal(request: pb.GenerateRequest) -> RefusedError:
    with pytest.raises(RefusedError) as caught:
        make_submit(request, EOS, limits())
    return caught.value


def test_zeros_mean_the_defaults() -> None:
    made = submit()

    sampling = made.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1, 1, 0, 0)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0, 0, 1)
    assert not sampling.HasField("logprobs")
    assert not made.HasField("prompt_logprobs")
    assert not made.HasField("constraint")
    assert (made.n, made.max_tokens, made.min_tokens) == (1, 0, 0)
    assert made.key.request_id == "a"
    assert made.prompt_token_ids == [5, 6]


def test_parameters_keep_their_values() -> None:
    made = submit(
        temperature=0,
        top_p=0.5,
        top_k=3,
        min_p=0.25,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=2,
        seed=7,
        logprobs=0,
        prompt_logprobs=2,
        logit_bias={3: -100},
        max_tokens=9,
        min_tokens=4,
        n=2,
    )

    sampling = made.sampling
    assert sampling.HasField("temperature")
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0, 0.5, 3, 0.25)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1, -1, 2)
    assert (sampling.seed, dict(sampling.logit_bias)) == (7, {3: -100})
    assert (sampling.HasField("logprobs"), sampling.logprobs, made.prompt_logprobs) == (True, 0, 2)
    assert (made.max_tokens, made.min_tokens, made.n) == (9, 4, 2)


def test_seeds_are_drawn_where_none_is_given_and_may_be_negative() -> None:
    assert submit().sampling.seed != submit().sampling.seed
    assert submit(seed=-1).sampling.seed == 2**64 - 1


def test_end_of_sequence_tokens_stop_unless_they_are_ignored() -> None:
    assert submit(stop_token_ids=[9]).stop_token_ids == [1, 2, 9]
    assert submit(stop_token_ids=[9], ignore_eos=True).stop_token_ids == [9]


def test_more_tokens_than_the_context_holds_are_as_many_as_fit() -> None:
    assert submit(max_tokens=97).max_tokens == 97
    assert submit(max_tokens=98).max_tokens == 0
    assert submit(max_tokens=2**32 - 1).max_tokens == 0


@pytest.mark.parametrize(
    ("given", "constraint"),
    [
        ({"json_schema": "{}"}, Constraint(json_schema="{}")),
        ({"json_object": True}, Constraint(json_object=True)),
        ({"regex": "a+"}, Constraint(regex="a+")),
        ({"grammar": "root ::= x"}, Constraint(ebnf="root ::= x")),
        ({"choice": pb.ChoiceConstraint(choices=["a", "b"])}, Constraint(choice=Choices(values=["a", "b"]))),
        ({"json_object": False}, Constraint()),
    ],
)
def test_constraints_are_those_of_clients(given: dict[str, Any], constraint: Constraint) -> None:
    assert submit(**given).constraint == constraint


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_p": math.nan}, "top_p"),
        ({"min_p": 2}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": math.inf}, "frequency_penalty"),
        ({"repetition_penalty": -1}, "repetition_penalty"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"logit_bias": {-1: 1}}, "logit_bias"),
        ({"logit_bias": {1000: 1}}, "logit_bias"),
        ({"logit_bias": {5: 101}}, "logit_bias[5]"),
        ({"logit_bias": dict.fromkeys(range(1025), 0)}, "logit_bias"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens"),
        ({"n": 2**32 - 1}, "n"),
        ({"stop": [""]}, "stop[0]"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop_token_ids": [1] * 129}, "stop_token_ids"),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(params: dict[str, Any], field: str) -> None:
    refused = refusal(ask([5], **params))

    assert refused.code is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.field == f"sampling_params.{field}"


def test_log_probabilities_of_a_prompt_are_bounded_in_all() -> None:
    refused = refusal(ask([5] * 13_000, prompt_logprobs=20))

    assert refused.field == "sampling_params.prompt_logprobs"
    assert "at most 262144" in str(refused)


@pytest.mark.parametrize("request_id", ["", "x" * 129])
def test_a_request_has_an_id(request_id: str) -> None:
    assert refusal(ask([5], request_id)).field == "request_id"


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"text": "x"}, "text"),
        ({"mm_inputs": pb.MultimodalInputs()}, "mm_inputs"),
        ({"extra_mm_inputs": [pb.MultimodalInputs()]}, "extra_mm_inputs"),
        ({"media_refs": pb.MediaRefs()}, "media_refs"),
        ({"kv_transfer_params_json": "{}"}, "kv_transfer_params_json"),
        ({"data_parallel_rank": 0}, "data_parallel_rank"),
        (
            {"sampling_params": pb.SamplingParams(truncate_prompt_tokens=1)},
            "sampling_params.truncate_prompt_tokens",
        ),
        ({"sampling_params": pb.SamplingParams(structural_tag="x")}, "sampling_params.structural_tag"),
    ],
)
def test_what_is_not_served_is_refused_by_name(given: dict[str, Any], field: str) -> None:
    refused = refusal(pb.GenerateRequest(request_id="a", **given))

    assert (refused.code, refused.field) == (grpc.StatusCode.UNIMPLEMENTED, field)
