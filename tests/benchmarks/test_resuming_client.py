"""The client of the benchmarks of faults: what it sends once its router is lost."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from benchmarks.resuming_client import ResumingStream
from pagoda.v1 import inference_pb2 as pb
from pagoda.v1.sampling_pb2 import SamplingParams

ACCEPTED = pb.Accepted(seed=7, model_revision="r1")


class Routers:
    """Each call gives one token more; the first breaks after it."""

    def __init__(self) -> None:
        self.specs: list[pb.GenerateSpec] = []

    async def GenerateStream(  # noqa: N802
        self, request: pb.GenerateStreamRequest
    ) -> AsyncIterator[pb.GenerateStreamResponse]:
        self.specs.append(pb.GenerateSpec.FromString(request.spec.SerializeToString()))
        yield pb.GenerateStreamResponse(accepted=ACCEPTED)
        number = len(self.specs)
        reason = pb.FINISH_REASON_LENGTH if number == 2 else pb.FINISH_REASON_UNSPECIFIED
        yield pb.GenerateStreamResponse(delta=pb.OutputDelta(token_ids=[number], finish_reason=reason))
        if number == 1:
            nothing: Any = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, "gone", "")


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0), SamplingParams(seed=7)])
async def test_it_resumes_with_what_it_was_told_and_has(sampling: SamplingParams) -> None:
    routers = Routers()
    spec = pb.GenerateSpec(text="fox", sampling=sampling)

    stream = ResumingStream([routers], 0, spec, pause_s=0.0)
    async with asyncio.timeout(20):
        await stream.task

    assert (stream.code, stream.token_ids) == (grpc.StatusCode.OK, [1, 2])
    resumed = routers.specs[1]
    assert (resumed.sampling.seed, resumed.model_revision) == (7, "r1")
    assert list(resumed.prior_outputs) == [pb.PriorOutput(token_ids=[1])]
    assert not spec.prior_outputs
