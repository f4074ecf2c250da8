"""One output of a request: tokens in, text out."""

from collections.abc import Iterable

from common.detokenizer import Detokenizer
from common.stop_strings import StopMatcher
from pagoda.scheduler.v1.scheduler_pb2 import SequenceOutput
from pagoda.v1.inference_pb2 import FinishReason, OutputDelta
from router.errors import invalid
from router.validation import Request


class Output:
    """Detokenises one output and ends it at a stop string that ends after its first `min_tokens` tokens.

    Attributes:
        num_tokens: Prior ones and the one that ended it included.
        finished: Nothing more comes.
    """

    def __init__(self, index: int, request: Request, detokenizer: Detokenizer) -> None:
        self.num_tokens = 0
        self.finished = False
        self._index = index
        self._detokenizer = detokenizer
        self._min_tokens = request.min_tokens
        self._stops = StopMatcher(request.stop_strings, include=request.include_stop_string)

    def prime(self, token_ids: Iterable[int], finished: bool) -> None:
        """Takes what the client already holds; only what comes after it is given out.

        Raises:
            RequestError: a stop string ended it long ago, but it isn't marked as finished.
        """
        for token_id in token_ids:
            self._push(token_id)
        self.finished = finished
        if self._stops.matched is not None and not finished:
            message = f"output {self._index} holds the stop string {self._stops.matched!r}: set finished"
            raise invalid("spec.prior_outputs", message)

    def add(self, arrived: SequenceOutput) -> OutputDelta:
        """What the tokens that arrived make certain."""
        texts: list[str] = []
        for token_id in arrived.token_ids:
            texts.append(self._push(token_id))
            if self._stops.matched is not None:
                break
        count = len(texts)
        delta = OutputDelta(
            index=self._index,
            token_ids=arrived.token_ids[:count],
            logprobs=arrived.logprobs[:count],
            finish_reason=arrived.finish_reason,
        )
        if self._stops.matched is None and arrived.finish_reason:
            texts.append(self._stops.push(self._detokenizer.flush(), count=self._may_stop))
            texts.append(self._stops.flush())
        if self._stops.matched is not None:
            delta.finish_reason = FinishReason.FINISH_REASON_STOP
            delta.stop_string = self._stops.matched
        elif arrived.finish_reason == FinishReason.FINISH_REASON_STOP and count:
            delta.stop_token_id = arrived.token_ids[-1]
        if arrived.HasField("score"):
            delta.score = arrived.score
        delta.text = "".join(texts)
        self.finished = delta.finish_reason != 0
        return delta

    @property
    def _may_stop(self) -> bool:
        return self.num_tokens > self._min_tokens

    def _push(self, token_id: int) -> str:
        self.num_tokens += 1
        return self._stops.push(self._detokenizer.push(token_id), count=self._may_stop)
