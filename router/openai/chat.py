"""POST /v1/chat/completions: one conversation, `n` answers."""

import json
from contextlib import aclosing
from typing import Any

from fastapi.responses import JSONResponse, Response

from pagoda.v1 import inference_pb2 as pb
from router.errors import invalid, unserved
from router.inference import Caller, Inference
from router.openai import tools
from router.openai.answers import FINISH_REASONS, Envelope, all_accepted, whole
from router.openai.calls import Call
from router.openai.logprobs import chat_logprobs
from router.openai.schemas import ChatBody, ChatInput, Message
from router.openai.spec import common_spec
from router.openai.streaming import Chunks, event_stream, merged
from router.openai.tools import ToolReader


async def chat(inference: Inference, body: ChatBody, call: Call, caller: Caller) -> Response:
    """The answer, whole or as a stream.

    Raises:
        RequestError: the request is refused, or fails before its answer begins.
    """
    answering = _Chat(inference, body, call)
    if body.stream:
        return await event_stream(answering.chunks(caller), call)
    return JSONResponse(await answering.whole(caller))


def chat_of(body: ChatInput) -> pb.Chat:
    """What the chat template gets.

    Raises:
        RequestError: a part of it isn't served.
    """
    continued = bool(body.continue_final_message)
    if body.add_generation_prompt is not None and body.add_generation_prompt is continued:
        message = "must be the opposite of continue_final_message, which is false by default"
        raise invalid("add_generation_prompt", message)
    arguments = body.chat_template_kwargs
    return pb.Chat(
        messages=[_message(message, f"messages[{i}]") for i, message in enumerate(body.messages)],
        continue_final_message=continued,
        tools=tools.to_proto(body.tools or []),
        template_arguments=json.dumps(arguments) if arguments else "",
    )


def _message(message: Message, field: str) -> pb.ChatMessage:
    if message.content is None and not (message.role == "assistant" and message.tool_calls):
        raise invalid(
            f"{field}.content", "is missing; only an assistant's message with tool_calls needs none"
        )
    if isinstance(message.content, list):
        for index, part in enumerate(message.content):
            if part.type != "text" or part.text is None:
                raise unserved(f"{field}.content[{index}]")
        content = "".join(part.text or "" for part in message.content)
    else:
        content = message.content or ""
    return pb.ChatMessage(
        # What OpenAI calls it now; templates know the old name.
        role="system" if message.role == "developer" else message.role,
        content=content,
        tool_calls=[
            pb.ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments or "{}")
            for call in message.tool_calls or []
        ],
        tool_call_id=message.tool_call_id or "",
        name=message.name or "",
    )


class _Chat:
    def __init__(self, inference: Inference, body: ChatBody, call: Call) -> None:
        self._inference = inference
        self._body = body
        self._id = f"chatcmpl-{call.request_id}"
        self._spec = common_spec(body, call.request_id)
        max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        if max_tokens is not None:
            self._spec.stop.max_tokens = max_tokens
        if body.logprobs:
            self._spec.sampling.logprobs = body.top_logprobs or 0
        elif body.top_logprobs:
            raise invalid("top_logprobs", "needs logprobs: true")
        self._make_parser = tools.set_choice(self._spec, body, inference.tool_call_format)
        self._spec.chat.CopyFrom(chat_of(body))
        if body.tool_choice == "none":
            self._spec.chat.ClearField("tools")

    async def whole(self, caller: Caller) -> dict[str, Any]:
        async with all_accepted(self._inference, self._body, [self._spec], caller) as runs:
            (outputs,) = await whole(runs)
            choices = []
            for output in outputs:
                reader = self._reader()
                message = tools.joined(reader.deltas(output.text, last=True))
                choices.append(self._choice(output, reader, {"message": message}))
            return Envelope("chat.completion", self._id, runs, self._body).around(*choices)

    async def chunks(self, caller: Caller) -> Chunks:
        async with all_accepted(self._inference, self._body, [self._spec], caller) as runs:
            yield None
            envelope = Envelope("chat.completion.chunk", self._id, runs, self._body)
            n = runs[0].request.n
            readers = [self._reader() for _ in range(n)]
            for index in range(n):
                opening = pb.OutputDelta(index=index)
                yield envelope.chunk(
                    self._choice(opening, readers[index], {"delta": {"role": "assistant", "content": ""}})
                )
            async with aclosing(merged(runs)) as outputs:
                async for _, output in outputs:
                    reader = readers[output.index]
                    *earlier, last = [*reader.deltas(output.text, output.finish_reason != 0)] or [{}]
                    for delta in earlier:
                        yield envelope.chunk(
                            self._choice(pb.OutputDelta(index=output.index), reader, {"delta": delta})
                        )
                    if last or output.finish_reason or output.logprobs:
                        yield envelope.chunk(self._choice(output, reader, {"delta": last}))
            for chunk in envelope.closing():
                yield chunk

    def _reader(self) -> ToolReader:
        parser = self._make_parser() if self._make_parser else None
        return ToolReader(parser, self._body.parallel_tool_calls is not False)

    def _choice(self, output: pb.OutputDelta, reader: ToolReader, said: dict[str, Any]) -> dict[str, Any]:
        logprobs = None
        if self._body.logprobs and output.logprobs:
            logprobs = chat_logprobs(self._inference.tokenizer, output.logprobs)
        finish_reason = FINISH_REASONS[output.finish_reason]
        if finish_reason == "stop" and reader.called:
            finish_reason = "tool_calls"
        return {"index": output.index, **said, "logprobs": logprobs, "finish_reason": finish_reason}
