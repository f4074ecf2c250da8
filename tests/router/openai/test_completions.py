"""POST /v1/completions, with OpenAI's client, against a scheduler that the test scripts."""

import asyncio
from typing import Any

import pytest

from tests.router.fake_scheduler import LENGTH, STOP
from tests.router.openai.conftest import EOS, Face, answer, ids, position


def complete(face: Face, prompt: Any = "quick fox", **fields: Any) -> "asyncio.Task[Any]":
    return asyncio.create_task(face.openai.completions.create(model="tiny", prompt=prompt, **fields))


async def test_a_prompt_is_completed(face: Face) -> None:
    call = complete(face, extra_headers={"X-Request-Id": "mine"})
    submit = await answer(face, "nothing 你好", cached_tokens=2)
    completion = await call

    assert list(submit.prompt_token_ids) == ids("quick fox")
    (choice,) = completion.choices
    assert (choice.text, choice.finish_reason, choice.logprobs) == ("nothing 你好", "stop", None)
    assert (completion.object, completion.id, completion.model) == ("text_completion", "cmpl-mine", "tiny")
    count = len(ids("nothing 你好")) + 1
    assert completion.usage.completion_tokens == count
    assert completion.usage.total_tokens == count + len(ids("quick fox"))
    assert completion.usage.prompt_tokens_details.cached_tokens == 2


async def test_without_max_tokens_an_output_has_16(face: Face) -> None:
    call = complete(face)
    submit = await answer(face, "fox")
    await call
    assert submit.max_tokens == 16


async def test_what_is_cut_off_ends_by_length(face: Face) -> None:
    call = complete(face, max_tokens=2)
    submit = await face.scheduler.accept()
    face.scheduler.send(submit, ids("lazy")[:2], LENGTH)
    assert (await call).choices[0].finish_reason == "length"


async def test_a_stop_string_ends_the_output(face: Face) -> None:
    call = complete(face, stop="wasted")
    submit = await face.scheduler.accept()
    face.scheduler.send(submit, ids("nothing is wasted. More"))
    (choice,) = (await call).choices
    assert (choice.text, choice.finish_reason) == ("nothing is ", "stop")


async def test_a_stream_gives_the_text_as_it_comes(face: Face) -> None:
    stream = complete(face, stream=True)
    submit = await face.scheduler.accept()
    chunks = aiter(await stream)
    face.scheduler.send(submit, ids("lazy"))
    first = await anext(chunks)
    face.scheduler.send(submit, [*ids(" dog"), EOS], STOP)
    rest = [chunk async for chunk in chunks]

    assert first.choices[0].text == "lazy"
    assert first.choices[0].finish_reason is None
    assert "".join(chunk.choices[0].text for chunk in rest) == " dog"
    assert rest[-1].choices[0].finish_reason == "stop"
    assert all(chunk.usage is None for chunk in rest)


async def test_a_stream_ends_with_the_usage_where_it_is_asked_for(face: Face) -> None:
    stream = complete(face, stream=True, stream_options={"include_usage": True})
    await answer(face, "fox")
    *_, last = [chunk async for chunk in await stream]
    assert last.choices == []
    assert last.usage.completion_tokens == len(ids("fox")) + 1


async def test_the_usage_comes_with_every_chunk_where_it_is_asked_for(face: Face) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = complete(face, stream=True, stream_options=options)
    await answer(face, "fox")
    assert all([chunk.usage.prompt_tokens == len(ids("quick fox")) async for chunk in await stream])


async def test_n_outputs_are_told_apart_by_index(face: Face) -> None:
    call = complete(face, n=2)
    submit = await face.scheduler.accept()
    face.scheduler.send(submit, [*ids("dog"), EOS], STOP, output_index=1)
    face.scheduler.send(submit, [*ids("fox"), EOS], STOP, output_index=0)
    assert submit.n == 2
    assert [(choice.index, choice.text) for choice in (await call).choices] == [(0, "fox"), (1, "dog")]


@pytest.mark.parametrize("stream", [False, True])
async def test_several_prompts_are_numbered_one_after_the_other(face: Face, stream: bool) -> None:
    prompts = ["fox", "dog"] if stream else [ids("fox"), ids("dog")]
    call = complete(face, prompts, n=2, stream=stream)
    submits = [await face.scheduler.accept() for _ in prompts]
    for place, word in ((1, "lazy"), (0, "quick")):
        for index in range(2):
            face.scheduler.send(submits[place], [*ids(word), EOS], STOP, output_index=index)
    answered = await call

    texts = [""] * 4
    for part in [chunk async for chunk in answered] if stream else [answered]:
        for choice in part.choices:
            texts[choice.index] += choice.text
    assert [list(submit.prompt_token_ids) for submit in submits] == [ids("fox"), ids("dog")]
    assert texts == ["quick", "quick", "lazy", "lazy"]


async def test_one_prompt_of_token_ids_is_one_prompt(face: Face) -> None:
    call = complete(face, ids("lazy dog"))
    submit = await answer(face, "fox")
    assert len((await call).choices) == 1
    assert list(submit.prompt_token_ids) == ids("lazy dog")


async def test_one_refused_prompt_frees_the_others(face: Face) -> None:
    response = asyncio.create_task(face.post("/v1/completions", prompt=["fox", "你" * 600]))
    submit = await face.scheduler.accept()
    assert (await response).status_code == 400
    assert (await face.scheduler.aborts.get()).key == submit.key


async def test_log_probabilities_have_the_shape_of_completions(face: Face) -> None:
    call = complete(face, "fox", logprobs=1)
    submit = await face.scheduler.accept()
    (japan,), half = ids("日本"), ids("한")[0]
    places = [position(japan, -0.5), position(half, -1, (japan, -2)), position(EOS, float("-inf"))]
    face.scheduler.send(submit, [japan, half, EOS], STOP, logprobs=places)
    logprobs = (await call).choices[0].logprobs

    assert submit.sampling.logprobs == 1
    assert logprobs.tokens == ["日本", "bytes:\\xed", "<|im_end|>"]
    assert logprobs.token_logprobs == [-0.5, -1, -9999]
    half_or_japan = {"日本": -2, "bytes:\\xed": -1}
    assert logprobs.top_logprobs == [{"日本": -0.5}, half_or_japan, {"<|im_end|>": -9999}]
    assert logprobs.text_offset == [0, 2, 2]


async def test_echo_puts_the_prompt_before_each_output(face: Face) -> None:
    call = complete(face, "lazy dog", echo=True, n=2)
    submit = await face.scheduler.accept()
    for index, word in enumerate((" fox", ".")):
        face.scheduler.send(submit, [*ids(word), EOS], STOP, output_index=index)
    assert [choice.text for choice in (await call).choices] == ["lazy dog fox", "lazy dog."]


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_with_logprobs_begins_with_the_prompts(face: Face, stream: bool) -> None:
    prompt, (japan,) = ids("lazy dog"), ids("日本")
    call = complete(face, prompt, echo=True, logprobs=0, stream=stream)
    submit = await face.scheduler.accept()
    places = [position(token_id, -2) for token_id in prompt[1:]]
    face.scheduler.send(submit, [japan], LENGTH, logprobs=[position(japan, -1)], prompt_logprobs=places)
    answered = await call
    (choice,) = (await anext(aiter(answered)) if stream else answered).choices

    assert choice.text == "lazy dog日本"
    assert choice.logprobs.token_logprobs == [None, *[-2] * (len(prompt) - 1), -1]
    assert choice.logprobs.top_logprobs[0] is None
    starts = choice.logprobs.text_offset
    assert (starts[0], starts[-1]) == (0, len("lazy dog"))
    assert [choice.text[start:end] for start, end in zip(starts, [*starts[1:], None], strict=True)] == (
        choice.logprobs.tokens
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_no_tokens_with_echo_are_the_prompt_alone(face: Face, stream: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if stream else {}
    call = complete(face, "lazy dog", echo=True, max_tokens=0, n=2, stream=stream, **options)
    submit = await face.scheduler.accept()
    for index in range(2):
        face.scheduler.send(submit, ids("fox")[:1], LENGTH, output_index=index)
    answered = await call
    parts = [chunk async for chunk in answered] if stream else [answered]

    assert submit.max_tokens == 1
    choices = [choice for part in parts for choice in part.choices]
    assert [(choice.text, choice.finish_reason) for choice in choices] == [("lazy dog", "length")] * 2
    assert (parts[-1].usage.completion_tokens, parts[-1].usage.total_tokens) == (0, len(ids("lazy dog")))


async def test_the_prompt_alone_may_have_logprobs(face: Face) -> None:
    prompt = ids("lazy dog")
    call = complete(face, prompt, echo=True, max_tokens=0, logprobs=0)
    submit = await face.scheduler.accept()
    places = [position(token_id, -2) for token_id in prompt[1:]]
    face.scheduler.send(submit, [EOS], STOP, logprobs=[position(EOS, -1)], prompt_logprobs=places)
    (choice,) = (await call).choices

    assert (choice.text, choice.finish_reason) == ("lazy dog", "length")
    assert choice.logprobs.token_logprobs == [None, *[-2] * (len(prompt) - 1)]
    assert len(choice.logprobs.tokens) == len(choice.logprobs.text_offset) == len(prompt)


async def test_more_prompts_than_the_router_ever_runs_are_refused_for_good(start_face: Any) -> None:
    face: Face = await start_face(max_concurrent_requests=2)
    error = await face.refused(prompt=["fox"] * 3)
    assert error["param"] == "prompt"
    assert "3 at once, but the router's --max-concurrent-requests is 2" in error["message"]


async def test_best_of_gives_the_likeliest_by_mean(face: Face) -> None:
    call = complete(face, best_of=3, n=2)
    submit = await face.scheduler.accept()
    for index, (word, logprob) in enumerate((("fox", -3.0), ("dog", -1.0), ("lazy", -2.0))):
        tokens = [*ids(word), EOS]
        places = [position(token_id, logprob) for token_id in tokens]
        face.scheduler.send(submit, tokens, STOP, output_index=index, logprobs=places)
    choices = (await call).choices

    assert submit.n == 3
    assert [(choice.index, choice.text, choice.logprobs) for choice in choices] == [
        (0, "dog", None),
        (1, "lazy", None),
    ]


async def test_a_beam_search_is_passed_on(face: Face) -> None:
    fields = {"use_beam_search": True, "length_penalty": 0.5, "early_stopping": True}
    call = complete(face, n=1, best_of=4, extra_body=fields)
    submit = await answer(face, "fox")
    assert (await call).choices[0].text == "fox"
    assert (submit.n, submit.beam_search.beam_width) == (1, 4)
    assert (submit.beam_search.length_penalty, submit.beam_search.early_stopping) == (0.5, True)


async def test_a_logged_request_is_named_by_its_path(
    start_face: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    face: Face = await start_face(log_requests="summary")
    call = complete(face, extra_headers={"X-Request-Id": "mine"})
    await answer(face, "fox")
    await call
    await face.grpc.router.inference.calls.wait_idle()
    (fields,) = [record.fields for record in caplog.records if record.name == "router.requests"]  # type: ignore[attr-defined]
    assert "/v1/completions" in fields.values()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"n": 0}, "n"),
        ({"logprobs": 21}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"suffix": "end"}, "suffix"),
    ],
)
async def test_what_is_refused_is_named(face: Face, fields: dict[str, Any], param: str) -> None:
    error = await face.refused(**{"prompt": "fox", **fields})
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: ")
