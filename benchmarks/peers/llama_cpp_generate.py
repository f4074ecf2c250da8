"""llama.cpp through llama-cpp-python, on a GGUF file as it is; one request after another."""

import time
from collections.abc import Callable
from typing import Any

from llama_cpp import Llama

Message = dict[str, Any]


def load(options: Message) -> Callable[[Message], Message]:
    """Loads the file."""
    model = Llama(
        options["gguf"],
        n_ctx=8192,
        n_threads=options["threads"],
        n_threads_batch=options["threads"],
        n_gpu_layers=-1 if options["device"] == "cuda" else 0,
        verbose=False,
    )

    def run(message: Message) -> Message:
        began = time.perf_counter()
        answers = []
        for request in message["requests"]:
            model.reset()
            times = []
            # It goes past end-of-sequence tokens by itself.
            for _ in model.generate(request["prompt"], temp=0.0):
                times.append(time.perf_counter() - began)
                if len(times) == request["max_tokens"]:
                    break
            answers.append([times[0], times[-1]])
        seconds = time.perf_counter() - began
        tokens = sum(request["max_tokens"] for request in message["requests"])
        return {"seconds": seconds, "tokens": tokens, "answers": answers}

    return run
