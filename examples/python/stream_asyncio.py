"""Streams the answers to several prompts at the same time over one channel.

From the repository's root: .venv/bin/python -m examples.python.stream_asyncio ADDRESS PROMPT [PROMPT...]
"""

import asyncio
import sys

import grpc

from examples.python.calls import CHANNEL_OPTIONS, describe
from pagoda.v1 import inference_pb2 as pb
from pagoda.v1.inference_pb2_grpc import InferenceServiceStub


async def main(address: str, prompts: list[str]) -> int:
    """Prints each answer when it is complete; returns the exit status. Ctrl-C cancels them all."""
    async with grpc.aio.insecure_channel(address, CHANNEL_OPTIONS) as channel:
        answers = await asyncio.gather(*(answer(channel, prompt) for prompt in prompts))
    return 0 if all(answers) else 1


async def answer(channel: grpc.aio.Channel, prompt: str) -> bool:
    """Streams one answer; False if the server refused or failed. Being cancelled cancels the call."""
    message = pb.ChatMessage(role="user", content=prompt)
    spec = pb.GenerateSpec(chat=pb.Chat(messages=[message]), stop=pb.StopConditions(max_tokens=64))
    call = InferenceServiceStub(channel).GenerateStream(pb.GenerateStreamRequest(spec=spec), timeout=60)
    text = ""
    try:
        async for response in call:
            match response.WhichOneof("event"):
                case "delta":
                    text += response.delta.text
                case "usage":
                    usage = response.usage
                    print(f"{prompt}\n{text}")
                    print(f"{usage.prompt_tokens} prompt tokens, {usage.completion_tokens} completion tokens")
    except grpc.aio.AioRpcError as error:
        print(describe(error), file=sys.stderr)
        return False
    return True


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    try:
        sys.exit(asyncio.run(main(sys.argv[1], sys.argv[2:])))
    except KeyboardInterrupt:
        sys.exit(130)
