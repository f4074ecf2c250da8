"""What a gateway sends."""

from typing import Any

from smg_grpc_proto import vllm_engine_pb2 as pb


def ask(prompt: list[int], request_id: str = "a", stream: bool = False, **params: Any) -> pb.GenerateRequest:
    """A GenerateRequest whose sampling parameters are `params`, and the protocol's zeros."""
    return pb.GenerateRequest(
        request_id=request_id,
        tokenized=pb.TokenizedInput(input_ids=prompt),
        sampling_params=pb.SamplingParams(**params),
        stream=stream,
    )
