"""POST /v1/completions: any number of prompts, each with `n` outputs."""

from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final

from fastapi.responses import JSONResponse, Response

from common.tokenizer import Tokenizer
from pagoda.v1 import inference_pb2 as pb
from router.errors import invalid
from router.inference import Caller, Inference, Running
from router.openai.answers import FINISH_REASONS, Envelope, all_accepted, whole
from router.openai.calls import Call
from router.openai.logprobs import CompletionLogprobs, mean_logprob
from router.openai.schemas import MAX_PROMPTS, CompletionBody
from router.openai.spec import common_spec
from router.openai.streaming import Chunks, event_stream, merged

DEFAULT_MAX_TOKENS: Final = 16


async def complete(inference: Inference, body: CompletionBody, call: Call, caller: Caller) -> Response:
    """The answer, whole or as a stream.

    Raises:
        RequestError: the request is refused, or fails before its answer begins.
    """
    completion = _Completion(inference, body, call)
    inference.check_count(len(completion.specs), caller.tenant, "prompt")
    if body.stream:
        return await event_stream(completion.chunks(caller), call)
    return JSONResponse(await completion.whole(caller))


class _Completion:
    """One body's requests, and the answer made of their outputs.

    Attributes:
        specs: One per prompt.
    """

    def __init__(self, inference: Inference, body: CompletionBody, call: Call) -> None:
        self._inference = inference
        self._body = body
        self._id = f"cmpl-{call.request_id}"
        self._n = 1 if body.n is None else body.n
        self._best_of = max(body.best_of or 0, self._n)
        self._echo_only = bool(body.echo) and body.max_tokens == 0
        self._check()
        self.specs = list(self._make_specs(call.request_id))

    def _check(self) -> None:
        body = self._body
        if body.best_of is not None and body.best_of < self._n:
            raise invalid("best_of", f"{body.best_of} must be at least n, which is {self._n}")
        if body.stream and self._best_of > self._n:
            raise invalid("best_of", "doesn't go with stream; the best are known only at the end")
        if self._echo_only and body.min_tokens:
            raise invalid("min_tokens", f"{body.min_tokens} must be at most max_tokens, which is 0")

    def _make_specs(self, request_id: str) -> Iterator[pb.GenerateSpec]:
        body = self._body
        common = common_spec(body, request_id)
        common.n = self._best_of
        common.stop.max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        if self._echo_only:
            # A request without an output there isn't: it makes one token, which nobody gets.
            common.stop.max_tokens = 1
        if body.use_beam_search:
            common.beam_search.beam_width = self._best_of
            common.n = self._n
        elif self._best_of > self._n:
            common.sampling.logprobs = 0
        if body.logprobs is not None:
            common.sampling.logprobs = body.logprobs
            if body.echo:
                common.prompt_logprobs = body.logprobs
        for prompt in _prompts(body):
            spec = pb.GenerateSpec()
            spec.CopyFrom(common)
            if isinstance(prompt, str):
                spec.text = prompt
            else:
                spec.token_ids.ids.extend(prompt)
            yield spec

    async def whole(self, caller: Caller) -> dict[str, Any]:
        async with all_accepted(self._inference, self._body, self.specs, caller) as runs:
            choices = []
            for place, outputs in enumerate(await whole(runs)):
                echo = await self._echo(runs[place])
                for index, output in enumerate(self._best(outputs)):
                    choices.append(self._choice(place, index, echo).piece(self._given(output)))
            return self._envelope(runs).around(*choices)

    async def chunks(self, caller: Caller) -> Chunks:
        async with all_accepted(self._inference, self._body, self.specs, caller) as runs:
            yield None
            envelope = self._envelope(runs)
            choices: dict[tuple[int, int], _Choice] = {}
            async with aclosing(merged(runs)) as deltas:
                async for place, delta in deltas:
                    key = place, delta.index
                    if key not in choices:
                        choices[key] = self._choice(*key, await self._echo(runs[place]))
                    piece = choices[key].piece(self._given(delta))
                    if _is_news(piece):
                        yield envelope.chunk(piece)
            for chunk in envelope.closing():
                yield chunk

    def _envelope(self, runs: Sequence[Running]) -> Envelope:
        return Envelope("text_completion", self._id, runs, self._body, echo_only=self._echo_only)

    def _given(self, delta: pb.OutputDelta) -> pb.OutputDelta:
        """What the client gets of it."""
        if not self._echo_only:
            return delta
        finish_reason = pb.FINISH_REASON_LENGTH if delta.finish_reason else pb.FINISH_REASON_UNSPECIFIED
        return pb.OutputDelta(index=delta.index, finish_reason=finish_reason)

    def _choice(self, place: int, index: int, echo: "_Echo") -> "_Choice":
        shaped = self._body.logprobs is not None
        return _Choice(place * self._n + index, self._inference.tokenizer if shaped else None, echo)

    def _best(self, outputs: Sequence[pb.OutputDelta]) -> Sequence[pb.OutputDelta]:
        if len(outputs) == self._n:
            return outputs
        ranked = sorted(outputs, key=lambda output: mean_logprob(output.logprobs), reverse=True)
        return ranked[: self._n]

    async def _echo(self, run: Running) -> "_Echo":
        """What stands before each output of a prompt."""
        if not self._body.echo:
            return _Echo("", None)
        tokenizer, token_ids = self._inference.tokenizer, run.request.prompt_token_ids
        text = await tokenizer.run(lambda: tokenizer.decode(token_ids))
        if self._body.logprobs is None:
            return _Echo(text, None)
        logprobs = run.prompt_logprobs()
        assert logprobs is not None  # noqa: S101
        return _Echo(text, CompletionLogprobs(tokenizer).of(token_ids, logprobs.positions))


@dataclass(frozen=True)
class _Echo:
    """A prompt as part of the answer, or nothing."""

    text: str
    logprobs: dict[str, list[Any]] | None


class _Choice:
    """One output on its way to the client."""

    def __init__(self, index: int, tokenizer: Tokenizer | None, echo: _Echo) -> None:
        """With a `tokenizer`, log-probabilities are given out."""
        self._index = index
        self._logprobs = CompletionLogprobs(tokenizer, len(echo.text)) if tokenizer else None
        self._echo: _Echo | None = echo

    def piece(self, delta: pb.OutputDelta) -> dict[str, Any]:
        """What is new; at first, after the echo."""
        text = delta.text
        logprobs = self._logprobs.of(delta.token_ids, delta.logprobs) if self._logprobs else None
        if echo := self._echo:
            self._echo = None
            text = echo.text + text
            if logprobs and echo.logprobs:
                logprobs = {name: echo.logprobs[name] + values for name, values in logprobs.items()}
        finish_reason = FINISH_REASONS[delta.finish_reason]
        return {"index": self._index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


def _prompts(body: CompletionBody) -> Sequence[str | list[int]]:
    """One or several, as the first element tells."""
    match body.prompt:
        case [str() | list(), *_] as several:
            if len(several) > MAX_PROMPTS:
                raise invalid("prompt", f"{len(several)} prompts, at most {MAX_PROMPTS} are taken")
            return several  # type: ignore[return-value]
        case one:
            return [one]  # type: ignore[list-item]


def _is_news(piece: dict[str, Any]) -> bool:
    """Whether there is something to tell: a token may give no text, or no text yet."""
    return bool(piece["text"] or piece["logprobs"] or piece["finish_reason"])
