from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from common.model_files import ModelFiles
from common.tokenizer import Tokenizer
from pagoda.v1.inference_pb2 import (
    BeamSearch,
    Chat,
    ChatMessage,
    Constraint,
    GenerateSpec,
    PriorOutput,
    StopConditions,
    TokenIds,
)
from pagoda.v1.sampling_pb2 import SamplingParams
from router.chat_template import ChatTemplate
from router.errors import RequestError
from router.prompt import PromptEncoder
from router.validation import Limits, validate
from tests.router.models import write_model

LIMITS = Limits(model="tiny", max_model_len=32, vocab_size=420, eos_token_ids=(1,))
IDS = TokenIds(ids=[5, 6, 7])


@pytest.fixture(scope="module")
def prompts(model_folder: Path) -> PromptEncoder:
    files = ModelFiles.read(model_folder)
    return PromptEncoder(Tokenizer(files), ChatTemplate(files), max_prompt_bytes=1000)


def sampling(**fields: Any) -> GenerateSpec:
    return GenerateSpec(token_ids=IDS, sampling=SamplingParams(**fields))


def stop(**fields: Any) -> GenerateSpec:
    return GenerateSpec(token_ids=IDS, stop=StopConditions(**fields))


def prior(*outputs: PriorOutput, seed: int | None = 1, **fields: Any) -> GenerateSpec:
    return GenerateSpec(
        token_ids=IDS,
        prior_outputs=outputs,
        sampling=SamplingParams(seed=seed),
        stop=StopConditions(**fields),
    )


def chat(*messages: tuple[str, str]) -> GenerateSpec:
    return GenerateSpec(chat=Chat(messages=[ChatMessage(role=role, content=text) for role, text in messages]))


NAN, INF = float("nan"), float("inf")


def beams(search: BeamSearch, **fields: Any) -> GenerateSpec:
    return GenerateSpec(token_ids=IDS, beam_search=search, **fields)


INVALID = [
    (GenerateSpec(), "spec.prompt", "give text, token_ids or chat"),
    (GenerateSpec(text=""), "spec.text", "no tokens"),
    (GenerateSpec(token_ids=TokenIds()), "spec.token_ids.ids", "at least one token"),
    (GenerateSpec(chat=Chat()), "spec.chat.messages", "at least one message"),
    (chat(("", "hi")), "spec.chat.messages[0].role", "is empty"),
    (GenerateSpec(token_ids=TokenIds(ids=[1, 420])), "spec.token_ids.ids[1]", "420 must be less than"),
    (GenerateSpec(token_ids=TokenIds(ids=[5] * 32)), "spec.token_ids.ids", "32 prompt tokens.*at most 32"),
    (GenerateSpec(text="fox 你" * 60), "spec.text", "prompt tokens"),
    (GenerateSpec(text="x" * 1001), "spec.text", "1001 bytes, at most 1000"),
    (chat(("user", "x" * 1001)), "spec.chat", "1013 bytes, at most 1000"),
    (chat(("user", "x" * 980)), "spec.chat.messages", "writes more than 1000 bytes"),
    (sampling(temperature=-0.5), "spec.sampling.temperature", "-0.5 must be at least 0"),
    (sampling(temperature=NAN), "spec.sampling.temperature", "nan"),
    (sampling(temperature=INF), "spec.sampling.temperature", "inf must be .* at most 100"),
    (sampling(top_p=0), "spec.sampling.top_p", "0 must be greater than 0"),
    (sampling(top_p=1.5), "spec.sampling.top_p", "1.5 must be .* at most 1"),
    (sampling(top_p=NAN), "spec.sampling.top_p", "nan"),
    (sampling(min_p=-1), "spec.sampling.min_p", "-1"),
    (sampling(min_p=2), "spec.sampling.min_p", "2"),
    (sampling(presence_penalty=-3), "spec.sampling.presence_penalty", "at least -2"),
    (sampling(frequency_penalty=2.5), "spec.sampling.frequency_penalty", "at most 2"),
    (GenerateSpec(token_ids=IDS, model_revision="x" * 129), "spec.model_revision", "129 characters .* 128"),
    (sampling(repetition_penalty=0), "spec.sampling.repetition_penalty", "at least 0.01"),
    (sampling(repetition_penalty=-INF), "spec.sampling.repetition_penalty", "-inf"),
    (sampling(logprobs=21), "spec.sampling.logprobs", "21 must be at most 20"),
    (GenerateSpec(token_ids=IDS, prompt_logprobs=21), "spec.prompt_logprobs", "21 must be at most 20"),
    (
        sampling(logit_bias=dict.fromkeys(range(1025), 0)),
        "spec.sampling.logit_bias",
        "1025 tokens, at most 1024",
    ),
    (sampling(logit_bias={420: 1}), "spec.sampling.logit_bias", "420 must be less than .* 420"),
    (sampling(logit_bias={7: 100.5}), "spec.sampling.logit_bias[7]", "100.5 must be .* at most 100"),
    (sampling(logit_bias={7: NAN}), "spec.sampling.logit_bias[7]", "nan must be at least -100"),
    (sampling(logit_bias={7: -INF}), "spec.sampling.logit_bias[7]", "-inf must be at least -100"),
    (
        beams(BeamSearch(beam_width=2), sampling=SamplingParams(logit_bias={7: 1})),
        "spec.sampling.logit_bias",
        "no meaning in a beam search",
    ),
    (stop(min_tokens=4, max_tokens=3), "spec.stop.min_tokens", "4 must be at most max_tokens, which is 3"),
    (stop(max_tokens=0), "spec.stop.max_tokens", "at least 1"),
    (stop(strings=["a"] * 17), "spec.stop.strings", "17 stop strings, at most 16"),
    (stop(strings=["a", ""]), "spec.stop.strings[1]", "0 bytes"),
    (stop(strings=["é" * 513]), "spec.stop.strings[0]", "1026 bytes .* 1024"),
    (stop(token_ids=range(129)), "spec.stop.token_ids", "129 stop tokens, at most 128"),
    (stop(token_ids=[3, 999]), "spec.stop.token_ids[1]", "999 must be less than"),
    (GenerateSpec(token_ids=IDS, request_id="x" * 129), "spec.request_id", "129 characters .* 128"),
    (GenerateSpec(token_ids=IDS, request_id="a\nb"), "spec.request_id", "printable ASCII"),
    (GenerateSpec(token_ids=IDS, request_id="é"), "spec.request_id", "printable ASCII"),
    (GenerateSpec(token_ids=IDS, n=0), "spec.n", "0 must be at least 1"),
    (GenerateSpec(token_ids=IDS, n=129), "spec.n", "129 must .* at most 128"),
    (GenerateSpec(token_ids=IDS, priority=1001), "spec.priority", "1001 must .* at most 1000"),
    (GenerateSpec(token_ids=IDS, priority=-1001), "spec.priority", "-1001 must be at least -1000"),
    (GenerateSpec(token_ids=IDS, cache_salt="é" * 65), "spec.cache_salt", "130 bytes .* 128"),
    (beams(BeamSearch()), "spec.beam_search.beam_width", "0 must be at least n, which is 1"),
    (beams(BeamSearch(beam_width=33)), "spec.beam_search.beam_width", "at most 32"),
    (beams(BeamSearch(beam_width=2), n=3), "spec.beam_search.beam_width", "2 must be at least n, which is 3"),
    (
        beams(BeamSearch(beam_width=2, length_penalty=float("nan"))),
        "spec.beam_search.length_penalty",
        "nan must be at least -10",
    ),
    (
        beams(BeamSearch(beam_width=2), sampling=SamplingParams(temperature=1)),
        "spec.sampling.temperature",
        "no meaning in a beam search",
    ),
    (
        beams(BeamSearch(beam_width=2), stop=StopConditions(strings=["a"])),
        "spec.stop.strings",
        "don't go with a beam search",
    ),
    (
        beams(BeamSearch(beam_width=2), prior_outputs=[PriorOutput(token_ids=[4])]),
        "spec.prior_outputs",
        "a beam search can't be resumed; send the request again without prior_outputs",
    ),
    (prior(PriorOutput(token_ids=[4]), seed=None), "spec.sampling.seed", "required with prior_outputs"),
    (prior(PriorOutput(index=1)), "spec.prior_outputs[0].index", "1 must be less than n"),
    (prior(PriorOutput(), PriorOutput()), "spec.prior_outputs[1].index", "twice"),
    (prior(PriorOutput(token_ids=[420])), "spec.prior_outputs[0].token_ids[0]", "420"),
    (prior(PriorOutput(token_ids=[4] * 30)), "spec.prior_outputs[0].token_ids", "30 tokens.*allow 29"),
    (
        prior(PriorOutput(token_ids=[4] * 2), max_tokens=2),
        "spec.prior_outputs[0].token_ids",
        "2 tokens are all .* set finished",
    ),
    (prior(PriorOutput(token_ids=[4, 1])), "spec.prior_outputs[0].token_ids", "stop token 1"),
    (
        GenerateSpec(token_ids=IDS, constraint=Constraint(regex="a"), beam_search=BeamSearch(beam_width=2)),
        "spec.constraint",
        "beam search",
    ),
    (GenerateSpec(token_ids=IDS, constraint=Constraint(regex="")), "spec.constraint.regex", "is empty"),
]
UNSERVED = [
    (GenerateSpec(token_ids=IDS, adapter="lora"), "spec.adapter"),
]


async def failure(spec: GenerateSpec, prompts: PromptEncoder) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await validate(spec, LIMITS, prompts)
    return caught.value


@pytest.mark.parametrize(("spec", "field", "message"), INVALID, ids=[f"{f}: {m}" for _, f, m in INVALID])
async def test_what_is_wrong_is_refused_by_field(
    prompts: PromptEncoder, spec: GenerateSpec, field: str, message: str
) -> None:
    error = await failure(spec, prompts)
    assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, field)
    with pytest.raises(RequestError, match=message):
        raise error


@pytest.mark.parametrize(("spec", "field"), UNSERVED, ids=[field for _, field in UNSERVED])
async def test_what_is_not_served_yet_is_named(
    prompts: PromptEncoder, spec: GenerateSpec, field: str
) -> None:
    error = await failure(spec, prompts)
    assert (error.code, error.field) == (grpc.StatusCode.UNIMPLEMENTED, field)


async def test_other_models_are_not_found(prompts: PromptEncoder) -> None:
    error = await failure(GenerateSpec(model="gpt", token_ids=IDS), prompts)
    assert error.code is grpc.StatusCode.NOT_FOUND
    assert "'gpt'" in error.message
    assert "'tiny'" in error.message


async def test_no_template_is_said(tmp_path: Path) -> None:
    tokenizer = Tokenizer(ModelFiles.read(write_model(tmp_path, chat_template=None)))
    error = await failure(chat(("user", "hi")), PromptEncoder(tokenizer, None, 1000))
    assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, "spec.chat")
    assert "no chat template" in error.message


async def test_encoded_text_outside_the_models_vocabulary_is_refused(prompts: PromptEncoder) -> None:
    small = Limits(model="tiny", max_model_len=32, vocab_size=10, eos_token_ids=())
    with pytest.raises(RequestError, match="less than the vocabulary's 10"):
        await validate(GenerateSpec(text="zebra"), small, prompts)


async def test_every_default_is_filled_in(prompts: PromptEncoder) -> None:
    request = await validate(GenerateSpec(token_ids=IDS), LIMITS, prompts)
    filled = request.sampling
    assert {descriptor.name for descriptor, _ in filled.ListFields()} >= {"temperature", "top_p", "top_k"}
    assert (filled.temperature, filled.top_p, filled.top_k, filled.min_p) == (1, 1, 0, 0)
    assert (filled.presence_penalty, filled.frequency_penalty, filled.repetition_penalty) == (0, 0, 1)
    assert not filled.HasField("logprobs")
    assert request.max_tokens == 0
    assert request.stop_token_ids == {1}
    assert request.prompt_token_ids == (5, 6, 7)


async def test_prompt_logprobs_of_a_long_prompt_are_bounded(prompts: PromptEncoder) -> None:
    limits = Limits(model="tiny", max_model_len=20_000, vocab_size=420, eos_token_ids=())
    spec = GenerateSpec(token_ids=TokenIds(ids=[5] * 12_483), prompt_logprobs=20)
    assert (await validate(spec, limits, prompts)).prompt_logprobs == 20

    spec.token_ids.ids.append(5)
    with pytest.raises(RequestError, match=r"12484 prompt tokens times 21 .* at most 262144; .* to 12483"):
        await validate(spec, limits, prompts)


async def test_prompt_logprobs_came_before_the_tokens_of_a_resumed_request(prompts: PromptEncoder) -> None:
    for token_ids, expected in (([], 3), ([4], None)):
        spec = prior(PriorOutput(token_ids=token_ids))
        spec.prompt_logprobs = 3
        assert (await validate(spec, LIMITS, prompts)).prompt_logprobs == expected


async def test_seed_and_request_id_are_drawn_anew_when_absent(prompts: PromptEncoder) -> None:
    first = await validate(GenerateSpec(token_ids=IDS), LIMITS, prompts)
    second = await validate(GenerateSpec(token_ids=IDS), LIMITS, prompts)
    assert first.sampling.seed != second.sampling.seed
    assert first.request_id != second.request_id


async def test_given_values_stay(prompts: PromptEncoder) -> None:
    spec = GenerateSpec(
        text="fox",
        model="tiny",
        request_id="mine",
        n=1,
        sampling=SamplingParams(temperature=0, seed=0, logprobs=0, top_k=7, logit_bias={419: -100}),
        stop=StopConditions(max_tokens=3, min_tokens=3, token_ids=[9], ignore_eos=True, strings=["x"]),
    )
    request = await validate(spec, LIMITS, prompts)
    assert (request.request_id, request.max_tokens, request.stop_strings) == ("mine", 3, ("x",))
    assert request.stop_token_ids == {9}
    assert request.sampling.HasField("logprobs")
    assert request.sampling.logit_bias == {419: -100}
    assert request.min_tokens == 3
    assert (request.sampling.temperature, request.sampling.seed, request.sampling.top_k) == (0, 0, 7)


async def test_finished_prior_output_may_end_as_it_did(prompts: PromptEncoder) -> None:
    request = await validate(prior(PriorOutput(token_ids=[4, 1], finished=True)), LIMITS, prompts)
    assert request.prior_outputs[0].token_ids == (4, 1)


def test_status_carries_all_details() -> None:
    error = RequestError(
        grpc.StatusCode.RESOURCE_EXHAUSTED, "full", reason="FULL", field="spec.n", retry_delay=1.5
    )
    status = error.status()
    assert (status.code, status.details) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "spec.n: full")
    details = unpack(dict(status.trailing_metadata)["grpc-status-details-bin"])
    assert details["ErrorInfo"].reason == "FULL"
    assert details["ErrorInfo"].domain == "pagoda"
    assert details["BadRequest"].field_violations[0].field == "spec.n"
    assert details["RetryInfo"].retry_delay.ToMilliseconds() == 1500


def unpack(packed: bytes) -> dict[str, Any]:
    status = status_pb2.Status.FromString(packed)
    found = {}
    for detail in status.details:
        name = detail.TypeName().rpartition(".")[2]
        found[name] = getattr(error_details_pb2, name).FromString(detail.value)
    return found


async def test_a_beam_search_gets_its_defaults(prompts: PromptEncoder) -> None:
    request = await validate(beams(BeamSearch(beam_width=4), n=2), LIMITS, prompts)

    assert request.n == 2
    assert request.beam_search == BeamSearch(beam_width=4, length_penalty=1, early_stopping=False)


async def test_priority_and_salt_are_carried(prompts: PromptEncoder) -> None:
    request = await validate(GenerateSpec(token_ids=IDS, priority=-3, cache_salt="mine"), LIMITS, prompts)

    assert (request.priority, request.cache_salt) == (-3, "mine")


@pytest.mark.parametrize("value", [0.01, 10])
async def test_the_ends_of_a_range_are_in_it(value: float, prompts: PromptEncoder) -> None:
    request = await validate(sampling(repetition_penalty=value), LIMITS, prompts)
    assert request.sampling.repetition_penalty == pytest.approx(value)
