"""From a router's Submit to a request, or to a refusal with a reason.

The router has validated what a client said. What is checked here is what only a scheduler knows, and what
would harm a shard.
"""

from collections.abc import Iterable
from typing import Final

import grpc
from google.protobuf.duration_pb2 import Duration

from pagoda.scheduler.v1.scheduler_pb2 import RequestRefused, Submit
from scheduler.beam_search import BeamSearch
from scheduler.block_hash import root_hash
from scheduler.limits import Limits
from scheduler.outbox import Outbox
from scheduler.request import Request, Sequence, State

# Sequences of one request: an output's index has a byte in its handle.
MAX_WIDTH: Final = 256


class RefusedError(Exception):
    """A request that won't be served."""

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        field: str = "",
        *,
        cause: str = "invalid",
        retry_delay_s: float | None = None,
    ) -> None:
        """`cause` is what metrics count it by."""
        super().__init__(message)
        self.code = code
        self.cause = cause
        self.field = field
        self.retry_delay_s = retry_delay_s

    def for_log(self) -> str:
        """The reason, without what may quote the client."""
        return f"{self.code.name} on {self.field}" if self.field else str(self)

    def to_proto(self, submit: Submit) -> RequestRefused:
        """The message to the router that submitted it."""
        refused = RequestRefused(key=submit.key, code=self.code.value[0], message=str(self), field=self.field)
        if self.retry_delay_s is not None:
            refused.retry_delay.FromNanoseconds(int(self.retry_delay_s * 1e9))
        return refused


def seconds(duration: Duration) -> float:
    """A protobuf duration in seconds."""
    return duration.seconds + duration.nanos / 1e9


def make_request(
    submit: Submit, outbox: Outbox, limits: Limits, model_revision: str, arrival: tuple[float, int]
) -> Request:
    """Checks a Submit and builds its request. `arrival` is (monotonic seconds, submission number).

    Raises:
        RefusedError: it can't be served here.
    """
    invalid = grpc.StatusCode.INVALID_ARGUMENT
    prompt_length = len(submit.prompt_token_ids)
    if not prompt_length:
        raise RefusedError(invalid, "the prompt has no tokens", "spec.prompt")
    if submit.model_revision and submit.model_revision != model_revision:
        message = f"model revision {submit.model_revision!r} was asked for, {model_revision!r} is served"
        raise RefusedError(grpc.StatusCode.FAILED_PRECONDITION, message, cause="model_changed")
    if prompt_length >= limits.max_model_len:
        message = (
            f"the prompt has {prompt_length} tokens; max_model_len is {limits.max_model_len} "
            "for prompt and output together"
        )
        raise RefusedError(invalid, message, "spec.prompt", cause="never_fits")
    _check_vocabulary(submit.prompt_token_ids, limits, "spec.prompt")
    _check_vocabulary(submit.sampling.logit_bias, limits, "spec.sampling.logit_bias")
    if submit.min_tokens:
        _check_vocabulary(submit.stop_token_ids, limits, "spec.stop.token_ids")
    if submit.adapter:
        message = "spec.adapter is not served yet"
        raise RefusedError(grpc.StatusCode.UNIMPLEMENTED, message, "spec.adapter", cause="unserved")

    width = max(submit.n, submit.beam_search.beam_width, 1)
    widest = min(limits.max_num_seqs, MAX_WIDTH)
    if width > widest:
        message = f"{width} is above max_num_seqs, which is {widest}"
        raise RefusedError(invalid, message, _width_field(submit))
    max_length = _max_length(submit, limits, width)
    if submit.min_tokens > max_length - prompt_length:
        message = f"{submit.min_tokens} is above the {max_length - prompt_length} tokens that fit"
        raise RefusedError(invalid, message, "spec.stop.min_tokens")
    request = Request(
        submit_key(submit),
        outbox,
        submit,
        (submit.priority, *arrival),
        frozenset(submit.stop_token_ids),
        _root_hash(submit, limits, arrival),
    )
    if submit.HasField("beam_search"):
        request.beams = BeamSearch(
            width,
            submit.beam_search.length_penalty,
            submit.beam_search.early_stopping,
            request.stop_token_ids,
            max_length - prompt_length,
            submit.min_tokens,
        )
        # Resumed or not, it begins anew: only the scheduler that it ran on knew the beams.
        request.sequences = [Sequence(request, 0, list(submit.prompt_token_ids), max_length)]
    else:
        request.sequences = [
            Sequence(request, index, list(submit.prompt_token_ids), max_length) for index in range(width)
        ]
        _resume(request, limits)
    going_on = [s for s in request.sequences if s.state is State.WAITING]
    if going_on and submit.HasField("prompt_logprobs") and prompt_length > 1:
        going_on[0].next_prompt_logprob = 1
    if not any(prior.token_ids for prior in submit.prior_outputs):
        # One computes the prompt, the others begin as its copies.
        for sequence in going_on[1:]:
            sequence.state = State.FORKING
    return request


def _resume(request: Request, limits: Limits) -> None:
    """Gives outputs what earlier attempts made of them."""
    for prior in request.submit.prior_outputs:
        field = "spec.prior_outputs"
        if prior.index >= len(request.sequences):
            message = f"index {prior.index} is not below n, which is {len(request.sequences)}"
            raise RefusedError(grpc.StatusCode.INVALID_ARGUMENT, message, field)
        _check_vocabulary(prior.token_ids, limits, field)
        sequence = request.sequences[prior.index]
        room = sequence.max_length - request.prompt_length
        if len(prior.token_ids) >= room and not prior.finished:
            message = f"{len(prior.token_ids)} prior tokens leave none of {room}"
            raise RefusedError(grpc.StatusCode.INVALID_ARGUMENT, message, field)
        sequence.token_ids += prior.token_ids
        if prior.finished:
            sequence.state = State.FINISHED


def _root_hash(submit: Submit, limits: Limits, arrival: tuple[float, int]) -> bytes:
    """Without prefix caching, a request finds its own blocks alone: its sequences share all the same."""
    own = "" if limits.prefix_caching else f"request {arrival[1]}"
    return root_hash(submit.adapter, submit.tenant, submit.cache_salt, own)


def submit_key(submit: Submit) -> tuple[str, int]:
    """(request id, attempt)."""
    return submit.key.request_id, submit.key.attempt


def _max_length(submit: Submit, limits: Limits, width: int) -> int:
    """Prompt and output tokens at most, of each sequence.

    All of them must fit the pool together: full blocks of the prompt once, what comes after once for each.
    The last token is never computed, so it needs no slot.
    """
    invalid = grpc.StatusCode.INVALID_ARGUMENT
    prompt_length = len(submit.prompt_token_ids)
    pool_length = _pool_length(prompt_length, width, limits)
    outputs = f" for {width} sequences" if width > 1 else ""
    if prompt_length >= pool_length:
        # The most with which the output fits as well, or at least a token of it.
        wanted = (max(submit.max_tokens, 1), 1)
        widest = next(filter(None, (_widest(prompt_length, tokens, width, limits) for tokens in wanted)), 0)
        if not widest:
            whole = limits.num_blocks * limits.block_size
            message = f"the prompt has {prompt_length} tokens; the whole KV pool holds {whole}"
            raise RefusedError(invalid, message, "spec.prompt", cause="never_fits")
        message = (
            f"{width} sequences with a prompt of {prompt_length} tokens don't fit the KV pool: "
            f"ask for at most {widest}"
        )
        raise RefusedError(invalid, message, _width_field(submit), cause="never_fits")
    if not submit.max_tokens:
        return min(limits.max_model_len, pool_length)
    max_length = prompt_length + submit.max_tokens
    for limit, name in (
        (limits.max_model_len, "max_model_len is"),
        (pool_length, f"the KV pool{outputs} holds"),
    ):
        if max_length > limit:
            message = (
                f"max_tokens {submit.max_tokens} after a prompt of {prompt_length} tokens is {max_length}; "
                f"{name} {limit}: ask for at most {limit - prompt_length}"
            )
            raise RefusedError(invalid, message, "spec.stop.max_tokens", cause="never_fits")
    return max_length


def _pool_length(prompt_length: int, width: int, limits: Limits) -> int:
    """Tokens that each of `width` sequences of this prompt can have in the whole pool, prompt included."""
    shared = prompt_length // limits.block_size if width > 1 else 0
    if limits.num_blocks < shared:
        return 0
    return (shared + (limits.num_blocks - shared) // width) * limits.block_size + 1


def _widest(prompt_length: int, output_length: int, width: int, limits: Limits) -> int:
    """The most sequences, fewer than `width`, that fit the pool with outputs of this length; 0 if not one."""
    length = prompt_length + output_length
    fitting = (
        fewer for fewer in range(width - 1, 0, -1) if length <= _pool_length(prompt_length, fewer, limits)
    )
    return next(fitting, 0)


def _width_field(submit: Submit) -> str:
    return "spec.beam_search.beam_width" if submit.beam_search.beam_width > submit.n else "spec.n"


def _check_vocabulary(token_ids: Iterable[int], limits: Limits, field: str) -> None:
    largest = max(token_ids, default=0)
    if largest >= limits.vocab_size:
        message = f"token id {largest} is not below the vocabulary's size, {limits.vocab_size}"
        raise RefusedError(grpc.StatusCode.INVALID_ARGUMENT, message, field)
