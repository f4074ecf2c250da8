"""A client's view of one streamed answer."""

import threading
from collections.abc import Iterator
from typing import Any

import grpc

from pagoda.v1 import inference_pb2 as pb
from pagoda.v1.inference_pb2_grpc import InferenceServiceStub
from pagoda.v1.sampling_pb2 import SamplingParams


def spec(
    prompt: str | list[int] = "Once upon a time",
    max_tokens: int | None = 32,
    temperature: float = 0,
    seed: int | None = None,
    **stop: Any,
) -> pb.GenerateSpec:
    """Greedy by default; `stop` are further StopConditions."""
    message = pb.GenerateSpec(
        sampling=SamplingParams(temperature=temperature, seed=seed),
        stop=pb.StopConditions(max_tokens=max_tokens, **stop),
    )
    if isinstance(prompt, str):
        message.text = prompt
    else:
        message.token_ids.CopyFrom(pb.TokenIds(ids=prompt))
    return message


class Answer:
    """Reads a stream as it comes."""

    def __init__(self, stub: InferenceServiceStub, request: pb.GenerateSpec, timeout: float = 120) -> None:
        self.call: Any = stub.GenerateStream(pb.GenerateStreamRequest(spec=request), timeout=timeout)
        self.accepted = pb.Accepted()
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason = pb.FINISH_REASON_UNSPECIFIED
        self.delta = pb.OutputDelta()
        self.usage = pb.Usage()

    def events(self) -> Iterator[pb.GenerateStreamResponse]:
        """Takes in each event, then yields it."""
        for event in self.call:
            if event.HasField("accepted"):
                self.accepted = event.accepted
            elif event.HasField("delta"):
                self.delta = event.delta
                self.text += event.delta.text
                self.token_ids += event.delta.token_ids
                self.finish_reason = event.delta.finish_reason
            elif event.HasField("usage"):
                self.usage = event.usage
            yield event

    def read(self, num_tokens: int) -> "Answer":
        """Until at least this many tokens came."""
        for _ in self.events():
            if len(self.token_ids) >= num_tokens:
                break
        return self

    def finish(self) -> "Answer":
        """To the end."""
        for _ in self.events():
            pass
        return self

    def finish_in_background(self) -> threading.Thread:
        """To the end, on a thread."""
        thread = threading.Thread(target=self.finish)
        thread.start()
        return thread


def status(call: Any) -> tuple[grpc.StatusCode, str]:
    """Code and message of a call that fails."""
    try:
        call()
    except grpc.RpcError as error:
        return error.code(), error.details() or ""
    raise AssertionError("the call succeeded")
