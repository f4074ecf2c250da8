"""What the answers of completions and chats have in common."""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final

from pagoda.v1 import inference_pb2 as pb
from router.errors import RequestError
from router.inference import Caller, Inference, Running
from router.openai.schemas import GenerateBody
from router.openai.spec import field_of

FINISH_REASONS: Final = {
    pb.FINISH_REASON_UNSPECIFIED: None,
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
}


@asynccontextmanager
async def all_accepted(
    inference: Inference, body: GenerateBody, specs: Iterable[pb.GenerateSpec], caller: Caller
) -> AsyncGenerator[list[Running]]:
    """Several requests of one body, from their acceptance to their end; all or none are accepted.

    Raises:
        RequestError: one is refused; for a constraint, naming the field of the body that it comes from.
    """
    async with AsyncExitStack() as stack:
        try:
            runs = [await stack.enter_async_context(inference.accepted(spec, caller)) for spec in specs]
        except RequestError as error:
            error.field = field_of(body, error.field)
            raise
        yield runs


async def whole(runs: Sequence[Running]) -> list[list[pb.OutputDelta]]:
    """The outputs of each request, each output in one piece.

    Raises:
        RequestError: one of them failed.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run.whole()) for run in runs]
    except* RequestError as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


class Envelope:
    """What stands around the choices of an answer, and of each chunk of one."""

    def __init__(
        self,
        kind: str,
        request_id: str,
        runs: Sequence[Running],
        body: GenerateBody,
        *,
        echo_only: bool = False,
    ) -> None:
        """With `echo_only`, the outputs aren't given out and don't count."""
        accepted = runs[0].accepted()
        self._fields = {
            "id": request_id,
            "object": kind,
            "created": int(time.time()),
            "model": accepted.model,
            "system_fingerprint": accepted.model_revision,
        }
        self._runs = runs
        self._echo_only = echo_only
        options = body.stream_options
        self._usage_last = options is not None and options.include_usage
        self._usage_always = options is not None and options.continuous_usage_stats

    def around(self, *choices: dict[str, Any]) -> dict[str, Any]:
        """A whole answer."""
        return {**self._fields, "choices": list(choices), "usage": self._usage()}

    def chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        """One piece of a stream."""
        chunk = {**self._fields, "choices": [choice]}
        if self._usage_always:
            chunk["usage"] = self._usage()
        elif self._usage_last:
            chunk["usage"] = None
        return chunk

    def closing(self) -> list[dict[str, Any]]:
        """What a stream ends with: the usage, where it was asked for."""
        if not self._usage_last:
            return []
        return [{**self._fields, "choices": [], "usage": self._usage()}]

    def _usage(self) -> dict[str, Any]:
        """Tokens so far, over all prompts."""
        sums = pb.Usage()
        for run in self._runs:
            one = run.usage()
            sums.prompt_tokens += one.prompt_tokens
            sums.completion_tokens += 0 if self._echo_only else one.completion_tokens
            sums.cached_tokens += one.cached_tokens
        return {
            "prompt_tokens": sums.prompt_tokens,
            "completion_tokens": sums.completion_tokens,
            "total_tokens": sums.prompt_tokens + sums.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sums.cached_tokens},
        }
