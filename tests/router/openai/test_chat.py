"""POST /v1/chat/completions, with OpenAI's client, against a scheduler that the test scripts."""

import asyncio
from typing import Any

import pytest

from router.openai.chat import chat_of
from router.openai.schemas import ChatInput
from tests.router.fake_scheduler import LENGTH, STOP
from tests.router.openai.conftest import EOS, Face, answer, ids, position

HI = [{"role": "user", "content": "hi"}]
PROMPT = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def chat(face: Face, messages: Any = HI, **fields: Any) -> "asyncio.Task[Any]":
    return asyncio.create_task(face.openai.chat.completions.create(model="tiny", messages=messages, **fields))


async def test_a_chat_is_answered(face: Face) -> None:
    call = chat(face, extra_headers={"X-Request-Id": "mine"})
    submit = await answer(face, "nothing 你好")
    completion = await call

    assert list(submit.prompt_token_ids) == ids(PROMPT)
    assert submit.max_tokens == 0
    (choice,) = completion.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "nothing 你好")
    assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)
    assert (completion.object, completion.id) == ("chat.completion", "chatcmpl-mine")
    assert completion.usage.prompt_tokens == len(ids(PROMPT))


async def test_a_stream_opens_with_the_role_and_gives_the_text_as_it_comes(face: Face) -> None:
    stream = chat(face, stream=True, stream_options={"include_usage": True})
    submit = await face.scheduler.accept()
    chunks = aiter(await stream)
    opening = await anext(chunks)
    face.scheduler.send(submit, ids("lazy"))
    first = await anext(chunks)
    face.scheduler.send(submit, [*ids(" dog"), EOS], STOP)
    *rest, usage = [chunk async for chunk in chunks]

    assert (opening.choices[0].delta.role, opening.choices[0].delta.content) == ("assistant", "")
    assert first.choices[0].delta.content == "lazy"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in rest) == " dog"
    assert rest[-1].choices[0].finish_reason == "stop"
    assert usage.choices == []
    assert usage.usage.completion_tokens == len([*ids("lazy dog"), EOS])


async def test_n_answers_stream_side_by_side(face: Face) -> None:
    stream = chat(face, stream=True, n=2)
    submit = await face.scheduler.accept()
    for index, word in enumerate(("fox", "dog")):
        face.scheduler.send(submit, [*ids(word), EOS], STOP, output_index=index)
    texts = ["", ""]
    async for chunk in await stream:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == ["fox", "dog"]


async def test_max_completion_tokens_bounds_the_answer(face: Face) -> None:
    call = chat(face, max_completion_tokens=3)
    submit = await face.scheduler.accept()
    face.scheduler.send(submit, ids("lazy")[:3], LENGTH)
    assert (await call).choices[0].finish_reason == "length"
    assert submit.max_tokens == 3


async def test_text_parts_are_joined_and_a_developer_is_the_system(face: Face) -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    call = chat(face, [{"role": "developer", "content": "short"}, {"role": "user", "content": parts}])
    submit = await answer(face, "fox")
    await call
    assert list(submit.prompt_token_ids) == ids(f"<|im_start|>system\nshort<|im_end|>\n{PROMPT}")


async def test_the_final_message_is_continued_where_asked_for(face: Face) -> None:
    messages = [*HI, {"role": "assistant", "content": "lazy"}]
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    call = chat(face, messages, extra_body=fields)
    submit = await answer(face, " dog")
    await call
    assert list(submit.prompt_token_ids) == ids(f"{PROMPT}lazy")


async def test_log_probabilities_have_the_shape_of_chats(face: Face) -> None:
    call = chat(face, logprobs=True, top_logprobs=2)
    submit = await face.scheduler.accept()
    (japan,), half = ids("日本"), ids("한")[0]
    places = [position(japan, -0.5, (half, -2)), position(EOS, -1)]
    face.scheduler.send(submit, [japan, EOS], STOP, logprobs=places)
    first, last = (await call).choices[0].logprobs.content

    assert submit.sampling.logprobs == 2
    assert (first.token, first.logprob, bytes(first.bytes).decode()) == ("日本", -0.5, "日本")
    assert [(one.token, one.logprob, one.bytes) for one in first.top_logprobs] == [
        ("日本", -0.5, first.bytes),
        ("bytes:\\xed", -2, [0xED]),
    ]
    assert last.token == "<|im_end|>"


async def test_streamed_log_probabilities_come_with_their_tokens(face: Face) -> None:
    stream = chat(face, logprobs=True, stream=True)
    submit = await face.scheduler.accept()
    tokens = [*ids("fox"), EOS]
    places = [position(token_id, -1) for token_id in tokens]
    face.scheduler.send(submit, tokens, STOP, logprobs=places)
    content = [
        entry
        async for chunk in await stream
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert "".join(entry.token for entry in content) == "fox<|im_end|>"
    assert [entry.top_logprobs for entry in content] == [[]] * len(tokens)


def test_a_call_without_arguments_may_have_none() -> None:
    call = {"function": {"name": "now", "arguments": ""}}
    body = ChatInput.model_validate({"messages": [{"role": "assistant", "tool_calls": [call]}]})
    assert chat_of(body).messages[0].tool_calls[0].arguments == "{}"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "nobody", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [*HI, {"role": "user"}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "tool", "tool_call_id": "1"}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
async def test_what_is_refused_is_named(face: Face, fields: dict[str, Any], param: str) -> None:
    error = await face.refused("/v1/chat/completions", **{"messages": HI, **fields})
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: ")
