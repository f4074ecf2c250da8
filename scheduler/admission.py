"""From a router's Submit to a request, or to a refusal with a reason.

The router has validated what a client said. What is checked here is what only a scheduler knows, and what
would harm a shard.
"""

from collections.abc import Iterable

import grpc
from google.protobuf.duration_pb2 import Duration

from pagoda.scheduler.v1.scheduler_pb2 import RequestRefused, Submit
from scheduler.outbox import Outbox
from scheduler.request import Request, Sequence, State
from scheduler.scheduler import Limits


class RefusedError(Exception):
    """A request that won't be served."""

    def __init__(
        self, code: grpc.StatusCode, message: str, field: str = "", retry_delay_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.field = field
        self.retry_delay_s = retry_delay_s

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
    submit: Submit, outbox: Outbox, limits: Limits, model_revision: str, rank: tuple[float, int]
) -> Request:
    """Checks a Submit and builds its request.

    Raises:
        RefusedError: it can't be served here.
    """
    invalid = grpc.StatusCode.INVALID_ARGUMENT
    prompt_length = len(submit.prompt_token_ids)
    if not prompt_length:
        raise RefusedError(invalid, "the prompt has no tokens", "spec.prompt")
    if submit.model_revision and submit.model_revision != model_revision:
        message = f"model revision {submit.model_revision!r} was asked for, {model_revision!r} is served"
        raise RefusedError(grpc.StatusCode.FAILED_PRECONDITION, message)
    if prompt_length >= limits.max_model_len:
        message = (
            f"the prompt has {prompt_length} tokens; max_model_len is {limits.max_model_len} "
            "for prompt and output together"
        )
        raise RefusedError(invalid, message, "spec.prompt")
    _check_vocabulary(submit.prompt_token_ids, limits, "spec.prompt")
    for field, wanted in (
        ("spec.n", submit.n > 1),
        ("spec.beam_search", submit.HasField("beam_search")),
        ("spec.constraint", submit.HasField("constraint")),
        ("spec.adapter", bool(submit.adapter)),
        ("spec.priority", bool(submit.priority)),
        ("spec.cache_salt", bool(submit.cache_salt)),
    ):
        if wanted:
            raise RefusedError(grpc.StatusCode.UNIMPLEMENTED, f"{field} is not served yet", field)

    request = Request(submit_key(submit), outbox, submit, rank, frozenset(submit.stop_token_ids))
    max_length = _max_length(submit, limits)
    sequence = Sequence(request, 0, list(submit.prompt_token_ids), max_length)
    for prior in submit.prior_outputs:
        if prior.index != 0:
            raise RefusedError(invalid, f"index {prior.index} is not below n = 1", "spec.prior_outputs")
        _check_vocabulary(prior.token_ids, limits, "spec.prior_outputs")
        if len(prior.token_ids) >= max_length - prompt_length and not prior.finished:
            message = f"{len(prior.token_ids)} prior tokens leave none of {max_length - prompt_length}"
            raise RefusedError(invalid, message, "spec.prior_outputs")
        sequence.token_ids += prior.token_ids
        if prior.finished:
            sequence.state = State.FINISHED
    request.sequences = [sequence]
    return request


def submit_key(submit: Submit) -> tuple[str, int]:
    """(request id, attempt)."""
    return submit.key.request_id, submit.key.attempt


def _max_length(submit: Submit, limits: Limits) -> int:
    """Prompt and output tokens at most. The last token is never computed, so it needs no slot."""
    prompt_length = len(submit.prompt_token_ids)
    pool_length = limits.num_blocks * limits.block_size + 1
    if prompt_length >= pool_length:
        message = f"the prompt has {prompt_length} tokens; the whole KV pool holds {pool_length - 1}"
        raise RefusedError(grpc.StatusCode.INVALID_ARGUMENT, message, "spec.prompt")
    if not submit.max_tokens:
        return min(limits.max_model_len, pool_length)
    max_length = prompt_length + submit.max_tokens
    for limit, name in ((limits.max_model_len, "max_model_len is"), (pool_length, "the KV pool holds")):
        if max_length > limit:
            message = (
                f"max_tokens {submit.max_tokens} after a prompt of {prompt_length} tokens is {max_length}; "
                f"{name} {limit}: ask for at most {limit - prompt_length}"
            )
            raise RefusedError(grpc.StatusCode.INVALID_ARGUMENT, message, "spec.stop.max_tokens")
    return max_length


def _check_vocabulary(token_ids: Iterable[int], limits: Limits, field: str) -> None:
    largest = max(token_ids, default=0)
    if largest >= limits.vocab_size:
        message = f"token id {largest} is not below the vocabulary's size, {limits.vocab_size}"
        raise RefusedError(grpc.StatusCode.INVALID_ARGUMENT, message, field)
