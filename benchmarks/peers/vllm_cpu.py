"""vLLM's own asynchronous engine, without its HTTP server. Prefix caching finds nothing in our work."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

Message = dict[str, Any]
_engines: list[AsyncLLM] = []


def load(options: Message) -> Callable[[Message], Message]:
    """Starts the engine."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    arguments = AsyncEngineArgs(
        model=options["model"],
        dtype=options["dtype"],
        max_model_len=8192,
        max_num_seqs=64,
        block_size=128,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )

    async def start() -> AsyncLLM:
        return AsyncLLM.from_engine_args(arguments)

    engine = loop.run_until_complete(start())
    _engines.append(engine)
    runs = 0

    def run(message: Message) -> Message:
        nonlocal runs
        runs += 1
        return loop.run_until_complete(_serve(engine, message, str(runs)))

    return run


def close() -> None:
    """Ends the engine's processes."""
    while _engines:
        _engines.pop().shutdown()


async def _serve(engine: AsyncLLM, message: Message, run: str) -> Message:
    kind = RequestOutputKind.DELTA if message["stream"] else RequestOutputKind.FINAL_ONLY
    began = time.perf_counter()

    async def one(index: int, request: Message) -> tuple[int, float, float]:
        if request["arrival_s"]:
            await asyncio.sleep(request["arrival_s"] - (time.perf_counter() - began))
        arrived = began + request["arrival_s"]
        sampling = SamplingParams(
            temperature=0,
            max_tokens=request["max_tokens"],
            ignore_eos=True,
            detokenize=True,
            output_kind=kind,
        )
        tokens, first, last = 0, 0.0, 0.0
        prompt = {"prompt_token_ids": request["prompt"]}
        async for output in engine.generate(prompt, sampling, f"{run}-{index}"):
            last = time.perf_counter() - arrived
            first = first or last
            tokens += len(output.outputs[0].token_ids)
        if tokens != request["max_tokens"]:
            raise RuntimeError(f"{tokens} tokens came of {request['max_tokens']}")
        return tokens, first, last

    served = await asyncio.gather(*(one(index, request) for index, request in enumerate(message["requests"])))
    seconds = time.perf_counter() - began
    answers = [[first, last] for _, first, last in served] if message["stream"] else []
    return {"seconds": seconds, "tokens": sum(tokens for tokens, _, _ in served), "answers": answers}
