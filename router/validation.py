"""A client's GenerateSpec to a Request in which nothing is left to check or to default."""

import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import grpc

from common.constraint import check_constraint
from common.sampling import (
    MAX_OUTPUTS,
    FieldError,
    Range,
    check_lengths,
    check_prompt_logprobs,
    check_stop_strings,
    check_stop_tokens,
    complete,
)
from pagoda.v1.inference_pb2 import BeamSearch, Constraint, GenerateSpec, StopConditions
from pagoda.v1.sampling_pb2 import SamplingParams
from router.errors import RequestError, invalid, unserved
from router.prompt import PromptEncoder

MAX_REQUEST_ID_LENGTH: Final = 128
MAX_BEAM_WIDTH: Final = 32
MAX_PRIORITY: Final = 1000
MAX_CACHE_SALT_BYTES: Final = 128
MAX_REVISION_LENGTH: Final = 128


@dataclass(frozen=True)
class Limits:
    """What the served model takes. Lengths in tokens."""

    model: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Prior:
    """What is already there of one output."""

    token_ids: tuple[int, ...] = ()
    finished: bool = False


@dataclass(frozen=True)
class Request:
    """One client's request, checked. `sampling` has every default filled in and is never changed."""

    request_id: str
    model: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    # Per output, prior tokens included; 0: as many as fit.
    max_tokens: int
    stop_strings: tuple[str, ...]
    include_stop_string: bool
    # The model's end-of-sequence tokens, unless they are ignored, and the client's own.
    stop_token_ids: frozenset[int]
    # What ends an output comes after so many of its tokens.
    min_tokens: int = 0
    n: int = 1
    beam_search: BeamSearch | None = None
    constraint: Constraint | None = None
    # Lower ones first.
    priority: int = 0
    cache_salt: str = ""
    # One per output when the client resumes, else none.
    prior_outputs: tuple[Prior, ...] = ()
    # The only one to take; empty: any.
    model_revision: str = ""
    # How many likeliest tokens to give at each of the prompt's positions; None: no log-probabilities at all.
    prompt_logprobs: int | None = None


async def validate(spec: GenerateSpec, limits: Limits, prompts: PromptEncoder) -> Request:
    """Checks everything, cheap things first, and encodes the prompt.

    Raises:
        RequestError: INVALID_ARGUMENT, UNIMPLEMENTED or NOT_FOUND, on the first field at fault.
    """
    try:
        return await _validate(spec, limits, prompts)
    except FieldError as error:
        raise invalid(error.field, str(error)) from error


async def _validate(spec: GenerateSpec, limits: Limits, prompts: PromptEncoder) -> Request:
    check_model(spec.model, limits.model)
    request_id = _request_id(spec.request_id)
    if spec.adapter:
        raise unserved("spec.adapter")
    _check_scheduling(spec)
    n = _n(spec)
    beam_search = _beam_search(spec, n)
    sampling = complete(spec.sampling, limits.vocab_size, "spec.sampling")
    stop_token_ids = _stop_token_ids(spec.stop, limits)
    if spec.HasField("constraint"):
        if beam_search:
            raise invalid("spec.constraint", "doesn't go with a beam search")
        check_constraint(spec.constraint, stop_token_ids, spec.stop.min_tokens, "spec.constraint")
    check_stop_strings(spec.stop.strings, "spec.stop.strings")
    if spec.stop.HasField("max_tokens"):
        check_lengths(spec.stop.max_tokens, spec.stop.min_tokens, "spec.stop")
    prompt, field = await _prompt(spec, prompts)
    if len(prompt) >= limits.max_model_len:
        raise invalid(
            field,
            f"{len(prompt)} prompt tokens, but prompt and output hold at most {limits.max_model_len}; "
            f"shorten the prompt to {limits.max_model_len - 1}",
            "PROMPT_TOO_LONG",
        )
    check_token_ids(prompt, limits.vocab_size, field)
    room = limits.max_model_len - len(prompt)
    prompt_logprobs = _prompt_logprobs(spec, len(prompt))
    return Request(
        request_id=request_id,
        model=limits.model,
        prompt_token_ids=tuple(prompt),
        sampling=sampling,
        max_tokens=spec.stop.max_tokens,
        min_tokens=spec.stop.min_tokens,
        stop_strings=tuple(spec.stop.strings),
        include_stop_string=spec.stop.include_stop_string,
        stop_token_ids=stop_token_ids,
        prior_outputs=_prior_outputs(
            spec, min(room, spec.stop.max_tokens or room), stop_token_ids, limits.vocab_size
        ),
        n=n,
        beam_search=beam_search,
        constraint=spec.constraint if spec.HasField("constraint") else None,
        priority=spec.priority,
        cache_salt=spec.cache_salt,
        model_revision=spec.model_revision,
        prompt_logprobs=prompt_logprobs,
    )


def check_model(given: str, served: str) -> None:
    """Raises `RequestError` on any name but the served model's, or none."""
    if given not in ("", served):
        message = f"model {given[:100]!r} isn't served here; {served!r} is"
        raise RequestError(grpc.StatusCode.NOT_FOUND, message, reason="MODEL_NOT_FOUND", field="spec.model")


def check_token_ids(token_ids: Iterable[int], vocab_size: int, field: str) -> None:
    """Raises `RequestError` on the first id that isn't in the vocabulary."""
    for index, token_id in enumerate(token_ids):
        if token_id >= vocab_size:
            raise invalid(f"{field}[{index}]", f"{token_id} must be less than the vocabulary's {vocab_size}")


def _request_id(given: str) -> str:
    if len(given) > MAX_REQUEST_ID_LENGTH:
        message = f"{len(given)} characters long, at most {MAX_REQUEST_ID_LENGTH} are taken"
        raise invalid("spec.request_id", message)
    if not (given.isascii() and given.isprintable()):
        raise invalid("spec.request_id", f"{given!a} must be printable ASCII")
    return given or uuid.uuid4().hex


def _n(spec: GenerateSpec) -> int:
    if spec.HasField("n") and not 1 <= spec.n <= MAX_OUTPUTS:
        raise invalid("spec.n", f"{spec.n} must be at least 1 and at most {MAX_OUTPUTS}")
    return spec.n or 1


def _beam_search(spec: GenerateSpec, n: int) -> BeamSearch | None:
    """Its defaults filled in; it takes no sampling parameters, which it would have no use for."""
    if not spec.HasField("beam_search"):
        return None
    given, field = spec.beam_search, "spec.beam_search"
    if not n <= given.beam_width <= MAX_BEAM_WIDTH:
        message = f"{given.beam_width} must be at least n, which is {n}, and at most {MAX_BEAM_WIDTH}"
        raise invalid(f"{field}.beam_width", message)
    penalty = given.length_penalty if given.HasField("length_penalty") else 1.0
    Range(1, -10, 10).check(penalty, f"{field}.length_penalty")
    for descriptor, _ in spec.sampling.ListFields():
        if descriptor.name != "seed":
            raise invalid(
                f"spec.sampling.{descriptor.name}", "has no meaning in a beam search; leave it unset"
            )
    if spec.stop.strings:
        raise invalid("spec.stop.strings", "don't go with a beam search; give token_ids")
    if spec.prior_outputs:
        # What a client holds are finished outputs, if any; the beams that might still beat them are lost.
        message = "a beam search can't be resumed; send the request again without prior_outputs"
        raise invalid("spec.prior_outputs", message)
    return BeamSearch(
        beam_width=given.beam_width, length_penalty=penalty, early_stopping=given.early_stopping
    )


def _check_scheduling(spec: GenerateSpec) -> None:
    if abs(spec.priority) > MAX_PRIORITY:
        message = f"{spec.priority} must be at least -{MAX_PRIORITY} and at most {MAX_PRIORITY}"
        raise invalid("spec.priority", message)
    if len(spec.model_revision) > MAX_REVISION_LENGTH:
        message = f"{len(spec.model_revision)} characters long, at most {MAX_REVISION_LENGTH} are taken"
        raise invalid("spec.model_revision", message)
    size = len(spec.cache_salt.encode())
    if size > MAX_CACHE_SALT_BYTES:
        raise invalid("spec.cache_salt", f"{size} bytes long, at most {MAX_CACHE_SALT_BYTES} are taken")


def _prompt_logprobs(spec: GenerateSpec, prompt_length: int) -> int | None:
    """None also for a request that is resumed with tokens: they came before the first of these."""
    if not spec.HasField("prompt_logprobs"):
        return None
    check_prompt_logprobs(spec.prompt_logprobs, prompt_length, "spec.prompt_logprobs")
    return None if any(prior.token_ids for prior in spec.prior_outputs) else spec.prompt_logprobs


def _stop_token_ids(stop: StopConditions, limits: Limits) -> frozenset[int]:
    field = "spec.stop.token_ids"
    check_stop_tokens(len(stop.token_ids), field)
    check_token_ids(stop.token_ids, limits.vocab_size, field)
    return frozenset(stop.token_ids) | frozenset(() if stop.ignore_eos else limits.eos_token_ids)


async def _prompt(spec: GenerateSpec, prompts: PromptEncoder) -> tuple[Sequence[int], str]:
    """The prompt's token ids, and the field that it came from."""
    match spec.WhichOneof("prompt"):
        case "text":
            return await prompts.encode_text(spec.text, "spec.text"), "spec.text"
        case "chat":
            return await prompts.encode_chat(spec.chat, "spec.chat"), "spec.chat.messages"
        case "token_ids" if spec.token_ids.ids:
            return spec.token_ids.ids, "spec.token_ids.ids"
        case "token_ids":
            raise invalid("spec.token_ids.ids", "is empty; give at least one token", "EMPTY_PROMPT")
        case _:
            raise invalid("spec.prompt", "is missing; give text, token_ids or chat", "EMPTY_PROMPT")


def _prior_outputs(
    spec: GenerateSpec, limit: int, stop_token_ids: frozenset[int], vocab_size: int
) -> tuple[Prior, ...]:
    """One per output, `limit` tokens long at most; one that isn't finished must be able to go on."""
    if not spec.prior_outputs:
        return ()
    if not spec.sampling.HasField("seed"):
        raise invalid("spec.sampling.seed", "is required with prior_outputs; give the one from Accepted")
    n = spec.n or 1
    priors: dict[int, Prior] = {}
    for position, prior in enumerate(spec.prior_outputs):
        where = f"spec.prior_outputs[{position}]"
        field, count = f"{where}.token_ids", len(prior.token_ids)
        if prior.index >= n:
            raise invalid(f"{where}.index", f"{prior.index} must be less than n, {n}")
        if prior.index in priors:
            raise invalid(f"{where}.index", f"{prior.index} is given twice")
        if count > limit:
            raise invalid(field, f"{count} tokens, but max_tokens and the context allow {limit}")
        check_token_ids(prior.token_ids, vocab_size, field)
        if not prior.finished:
            if count == limit:
                message = f"{count} tokens are all that max_tokens and the context allow: set finished"
                raise invalid(field, message)
            if ended_by := stop_token_ids.intersection(prior.token_ids):
                raise invalid(field, f"holds the stop token {min(ended_by)}: set finished")
        priors[prior.index] = Prior(tuple(prior.token_ids), prior.finished)
    return tuple(priors.get(index, Prior()) for index in range(n))
