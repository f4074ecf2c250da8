"""Asks once for a whole answer, and once for one as it is made.

From the repository's root: .venv/bin/python -m examples.python.generate ADDRESS PROMPT
"""

import sys

import grpc

from examples.python.calls import CHANNEL_OPTIONS, describe
from pagoda.v1 import inference_pb2 as pb
from pagoda.v1.inference_pb2_grpc import InferenceServiceStub


def main(address: str, prompt: str) -> int:
    """Prints both answers; returns the exit status."""
    message = pb.ChatMessage(role="user", content=prompt)
    spec = pb.GenerateSpec(chat=pb.Chat(messages=[message]), stop=pb.StopConditions(max_tokens=64))
    with grpc.insecure_channel(address, CHANNEL_OPTIONS) as channel:
        stub = InferenceServiceStub(channel)
        try:
            print("At once:")
            answer = stub.Generate(pb.GenerateRequest(spec=spec), timeout=60)
            print(answer.outputs[0].text)
            print("As it is made:")
            stream(stub, spec)
        except grpc.RpcError as error:
            print(describe(error), file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 130
    return 0


def stream(stub: InferenceServiceStub, spec: pb.GenerateSpec) -> None:
    """Prints text as it comes, then what it cost. Leaving early cancels the call, which frees its memory."""
    call = stub.GenerateStream(pb.GenerateStreamRequest(spec=spec), timeout=60)
    try:
        for response in call:
            match response.WhichOneof("event"):
                case "delta":
                    print(response.delta.text, end="", flush=True)
                case "usage":
                    usage = response.usage
                    print(
                        f"\n{usage.prompt_tokens} prompt tokens, {usage.completion_tokens} completion tokens"
                    )
    finally:
        call.cancel()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
