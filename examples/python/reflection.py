"""Calls the service without generated stubs: the server itself says what its messages look like.

Needs grpcio-reflection alone: python examples/python/reflection.py ADDRESS PROMPT
"""

import sys
from typing import Any

import grpc
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

SERVICE = "pagoda.v1.InferenceService"


def main(address: str, prompt: str) -> int:
    """Lists the services, streams one answer; returns the exit status."""
    with grpc.insecure_channel(address) as channel:
        try:
            database = ProtoReflectionDescriptorDatabase(channel)
            print("Services:", ", ".join(sorted(database.get_services())))
            service = DescriptorPool(database).FindServiceByName(SERVICE)
            method = service.FindMethodByName("GenerateStream")
            request_class = GetMessageClass(method.input_type)
            stream = channel.unary_stream(
                f"/{SERVICE}/{method.name}",
                request_serializer=request_class.SerializeToString,
                response_deserializer=GetMessageClass(method.output_type).FromString,
            )
            messages = [{"role": "user", "content": prompt}]
            request = request_class(spec={"chat": {"messages": messages}, "stop": {"max_tokens": 64}})
            show(stream(request, timeout=60))
        except grpc.RpcError as error:
            print(f"{error.code().name}: {error.details()}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 130
    return 0


def show(call: Any) -> None:
    """Prints text as it comes, then what it cost. Leaving early cancels the call, which frees its memory."""
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
        call.cancel()


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
