"""From a gateway's GenerateRequest to a Submit in which nothing is left to default.

The protocol is that of the package smg-grpc-proto, the meaning of its parameters that of vLLM.
"""

from collections.abc import Iterable
from typing import Any, Final

import grpc

from common.constraint import check_constraint
from common.sampling import (
    MAX_LOGPROBS,
    MAX_OUTPUTS,
    FieldError,
    check_lengths,
    check_prompt_logprobs,
    check_stop_strings,
    check_stop_tokens,
    complete,
)
from pagoda.scheduler.v1.scheduler_pb2 import RequestKey, Submit
from pagoda.v1.inference_pb2 import Choices, Constraint
from pagoda.v1.sampling_pb2 import SamplingParams
from scheduler.admission import RefusedError
from scheduler.limits import Limits

MAX_REQUEST_ID_LENGTH: Final = 128
_SERVED: Final = ("request_id", "tokenized", "sampling_params", "stream")
_UNSERVED_SAMPLING: Final = ("truncate_prompt_tokens", "structural_tag")
_SAMPLING: Final = "sampling_params"


def make_submit(request: Any, eos_token_ids: Iterable[int], limits: Limits) -> Submit:
    """What a `vllm.grpc.engine.GenerateRequest` asks for, with a seed drawn if it has none.

    Raises:
        RefusedError: INVALID_ARGUMENT or UNIMPLEMENTED, on the first field at fault.
    """
    try:
        return _make_submit(request, eos_token_ids, limits)
    except FieldError as error:
        raise RefusedError(grpc.StatusCode.INVALID_ARGUMENT, str(error), error.field) from error


def _make_submit(request: Any, eos_token_ids: Iterable[int], limits: Limits) -> Submit:
    given, prompt = request.sampling_params, request.tokenized.input_ids
    _refuse_unserved(request)
    if not 1 <= len(request.request_id) <= MAX_REQUEST_ID_LENGTH:
        message = f"{len(request.request_id)} characters long, must be 1 to {MAX_REQUEST_ID_LENGTH}"
        raise FieldError("request_id", message)
    if given.n > MAX_OUTPUTS:
        raise FieldError(f"{_SAMPLING}.n", f"{given.n} must be at most {MAX_OUTPUTS}")
    check_stop_strings(given.stop, f"{_SAMPLING}.stop")
    check_stop_tokens(len(given.stop_token_ids), f"{_SAMPLING}.stop_token_ids")
    prompt_logprobs = _num_logprobs(given, "prompt_logprobs")
    if prompt_logprobs is not None:
        check_prompt_logprobs(prompt_logprobs, len(prompt), f"{_SAMPLING}.prompt_logprobs")
    stop_token_ids = sorted({*given.stop_token_ids, *(() if given.ignore_eos else eos_token_ids)})
    constraint = _constraint(given)
    if constraint:
        check_constraint(constraint, stop_token_ids, given.min_tokens, f"{_SAMPLING}.constraint")
    return Submit(
        key=RequestKey(request_id=request.request_id),
        prompt_token_ids=prompt,
        sampling=complete(_sampling(given), limits.vocab_size, _SAMPLING),
        max_tokens=_max_tokens(given, len(prompt), limits),
        min_tokens=given.min_tokens,
        stop_token_ids=stop_token_ids,
        n=given.n or 1,
        constraint=constraint,
        prompt_logprobs=prompt_logprobs,
    )


def _refuse_unserved(request: Any) -> None:
    fields = [field.name for field, _ in request.ListFields() if field.name not in _SERVED]
    given = [field.name for field, _ in request.sampling_params.ListFields()]
    fields += [f"{_SAMPLING}.{name}" for name in given if name in _UNSERVED_SAMPLING]
    if fields:
        message = "not served by this version; leave it unset"
        raise RefusedError(grpc.StatusCode.UNIMPLEMENTED, message, fields[0])


def _sampling(given: Any) -> SamplingParams:
    """The protocol's zero means the default, except where zero is a value."""
    if strange := [token_id for token_id in given.logit_bias if token_id < 0]:
        raise FieldError(f"{_SAMPLING}.logit_bias", f"{strange[0]} is not a token id")
    return SamplingParams(
        temperature=given.temperature if given.HasField("temperature") else None,
        top_p=given.top_p or None,
        top_k=given.top_k,
        min_p=given.min_p,
        presence_penalty=given.presence_penalty,
        frequency_penalty=given.frequency_penalty,
        repetition_penalty=given.repetition_penalty or None,
        seed=given.seed % 2**64 if given.HasField("seed") else None,
        logprobs=_num_logprobs(given, "logprobs"),
        logit_bias=given.logit_bias,
    )


def _num_logprobs(given: Any, name: str) -> int | None:
    if not given.HasField(name):
        return None
    count: int = getattr(given, name)
    if not 0 <= count <= MAX_LOGPROBS:
        raise FieldError(f"{_SAMPLING}.{name}", f"{count} must be at least 0 and at most {MAX_LOGPROBS}")
    return count


def _max_tokens(given: Any, prompt_length: int, limits: Limits) -> int:
    """0, as many as fit, also where more are asked for than the context holds."""
    if not given.HasField("max_tokens"):
        return 0
    count: int = given.max_tokens
    check_lengths(count, given.min_tokens, _SAMPLING)
    return 0 if prompt_length + count >= limits.max_model_len else count


def _constraint(given: Any) -> Constraint | None:
    match given.WhichOneof("constraint"):
        case "json_schema":
            return Constraint(json_schema=given.json_schema)
        case "json_object" if given.json_object:
            return Constraint(json_object=True)
        case "regex":
            return Constraint(regex=given.regex)
        case "grammar":
            return Constraint(ebnf=given.grammar)
        case "choice":
            return Constraint(choice=Choices(values=given.choice.choices))
        case _:
            return None
