"""What a request's outputs look like to a gateway."""

from collections.abc import Callable, Iterator
from typing import Any, Final

from smg_grpc_proto import vllm_engine_pb2 as pb

from common.detokenizer import Detokenizer
from common.stop_strings import StopMatcher
from pagoda.scheduler.v1.scheduler_pb2 import SequenceOutput, StepOutputs
from pagoda.v1.inference_pb2 import FinishReason
from pagoda.v1.sampling_pb2 import PositionLogprobs

_STOP: Final = FinishReason.FINISH_REASON_STOP
_FINISH_REASONS: Final = {_STOP: "stop", FinishReason.FINISH_REASON_LENGTH: "length"}


class _Output:
    """One output, as far as it has come."""

    def __init__(self, detokenizer: Detokenizer, params: Any) -> None:
        self.num_tokens = 0
        self.cached_tokens = 0
        self.begun = False
        self.finished = False
        # What arrived and wasn't sent yet.
        self.pending = SequenceOutput()
        self._detokenizer = detokenizer
        self._min_tokens = params.min_tokens
        self._watches = bool(params.stop)
        self._matcher = StopMatcher(params.stop)

    @property
    def stop_string(self) -> str | None:
        """What ended it, if a stop string did."""
        return self._matcher.matched

    def add(self, arrived: SequenceOutput) -> bool:
        """Takes what arrived, up to the token that completes a stop string; whether one does."""
        before = self.num_tokens
        for count, token_id in enumerate(arrived.token_ids if self._watches else (), start=1):
            text = self._detokenizer.push(token_id)
            if before + count > self._min_tokens:
                self._matcher.push(text)
            if self.stop_string is not None:
                del arrived.token_ids[count:]
                del arrived.logprobs[count:]
                arrived.finish_reason = _STOP
                break
        self.num_tokens += len(arrived.token_ids)
        self.cached_tokens += arrived.cached_tokens
        self.pending.MergeFrom(arrived)
        self.finished = arrived.finish_reason != 0
        return self.stop_string is not None


class Answer:
    """Turns one call's outputs into its responses: chunks as tokens come, or each output whole at its end.

    The gateway cuts the text of an output at a stop string itself, but waits for the engine to end it.
    """

    def __init__(
        self, request: Any, n: int, detokenizer: Callable[[], Detokenizer], end_output: Callable[[int], None]
    ) -> None:
        """Answers a `vllm.grpc.engine.GenerateRequest` with `n` outputs.

        `end_output` is called with the index of one that a stop string ended, for nothing more to come.
        """
        self._request = request
        self._params = request.sampling_params
        self._outputs = [_Output(detokenizer(), self._params) for _ in range(n)]
        self._end_output = end_output
        self._prompt_logprobs: list[PositionLogprobs] = []

    @property
    def finished(self) -> bool:
        """There is nothing more to send."""
        return all(output.finished for output in self._outputs)

    def take(self, outputs: StepOutputs) -> Iterator[Any]:
        """The `GenerateResponse`s that follow from what arrived."""
        for handle, token_id in zip(outputs.handles, outputs.token_ids, strict=True):
            self._add(SequenceOutput(output_index=handle & 0xFF, token_ids=[token_id]))
        for arrived in outputs.sequences:
            self._add(arrived)
        for index, output in enumerate(self._outputs):
            if output.pending.finish_reason or (self._request.stream and output.pending.token_ids):
                yield from self._responses(index, output)
                output.pending = SequenceOutput()

    def _add(self, arrived: SequenceOutput) -> None:
        self._prompt_logprobs.extend(arrived.prompt_logprobs)
        output = self._outputs[arrived.output_index]
        if not output.finished and output.add(arrived):
            self._end_output(arrived.output_index)

    def _responses(self, index: int, output: _Output) -> Iterator[Any]:
        new = output.pending
        common = {
            "index": index,
            "prompt_tokens": len(self._request.tokenized.input_ids),
            "cached_tokens": output.cached_tokens,
            "output_logprobs": self._output_logprobs(new),
            "input_logprobs": None if output.begun else self._input_logprobs(),
        }
        output.begun = True
        if self._request.stream:
            chunk = pb.GenerateStreamChunk(
                token_ids=new.token_ids, completion_tokens=len(new.token_ids), **common
            )
            yield pb.GenerateResponse(chunk=chunk)
        if new.finish_reason:
            complete = pb.GenerateComplete(
                output_ids=new.token_ids,
                completion_tokens=output.num_tokens,
                finish_reason=_FINISH_REASONS[new.finish_reason],
                matched_stop_str=output.stop_string,
                **common,
            )
            last = new.token_ids[-1]
            stopped = new.finish_reason == _STOP and output.stop_string is None
            if stopped and last in self._params.stop_token_ids:
                complete.matched_token_id = last
            yield pb.GenerateResponse(complete=complete)

    def _output_logprobs(self, output: SequenceOutput) -> Any:
        if not output.logprobs:
            return None
        return pb.OutputLogProbs(
            token_logprobs=[position.chosen.logprob for position in output.logprobs],
            token_ids=[position.chosen.token_id for position in output.logprobs],
            top_logprobs=map(_top, output.logprobs) if self._params.logprobs else (),
        )

    def _input_logprobs(self) -> Any:
        """Of every prompt token; nothing is set for the first, which nothing precedes."""
        if not self._prompt_logprobs:
            return None
        others = (pb.InputTokenLogProb(value=one.chosen.logprob) for one in self._prompt_logprobs)
        top = (pb.TopLogProbs(), *map(_top, self._prompt_logprobs))
        return pb.InputLogProbs(
            token_logprobs=(pb.InputTokenLogProb(), *others),
            token_ids=self._request.tokenized.input_ids,
            top_logprobs=top if self._params.prompt_logprobs else (),
        )


def _top(position: PositionLogprobs) -> Any:
    return pb.TopLogProbs(
        values=[token.logprob for token in position.top],
        token_ids=[token.token_id for token in position.top],
    )
