"""`transformers`: `generate` on static batches of 16 in order of arrival, or its continuous batching."""

import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

BATCH = 16
Message = dict[str, Any]


class _Clock:
    """A streamer that notes when each token came; the first call brings the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, _value: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def load(options: Message) -> Callable[[Message], Message]:
    """Loads the model."""
    device = torch.device(options["device"])
    if device.type == "cpu":
        torch.set_num_threads(options["threads"])
    model = AutoModelForCausalLM.from_pretrained(options["model"], dtype=getattr(torch, options["dtype"]))
    model = model.to(device).eval()
    # Lengths are given: no token ends a sequence.
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)
    manager = _manager(model) if options.get("continuous") else None

    def run(message: Message) -> Message:
        if any(request["arrival_s"] for request in message["requests"]):
            raise ValueError("transformers is measured on requests that are all there at once")
        requests = message["requests"]
        return _continuous(manager, requests) if manager else _static(model, requests)

    return run


@torch.inference_mode()
def _static(model: Any, requests: list[Message]) -> Message:
    """Each batch runs until its longest output has ended; only the tokens asked for count."""
    began = time.perf_counter()
    answers = []
    for start in range(0, len(requests), BATCH):
        batch = requests[start : start + BATCH]
        width = max(len(request["prompt"]) for request in batch)
        pads = [width - len(request["prompt"]) for request in batch]
        ids = torch.tensor([[0] * pad + request["prompt"] for pad, request in zip(pads, batch, strict=True)])
        mask = torch.tensor([[0] * pad + [1] * (width - pad) for pad in pads])
        clock = _Clock()
        longest = max(request["max_tokens"] for request in batch)
        output = model.generate(
            ids.to(model.device),
            attention_mask=mask.to(model.device),
            max_new_tokens=longest,
            # A streamer waits for each token, and takes one sequence alone.
            **({"streamer": clock} if len(requests) == 1 else {}),
        )
        output = output.cpu()
        if output.shape[1] != width + longest:
            raise RuntimeError(f"{output.shape[1] - width} tokens came of {longest}")
        if clock.times:
            answers.append([clock.times[1] - began, clock.times[-1] - began])
    seconds = time.perf_counter() - began
    return {
        "seconds": seconds,
        "tokens": sum(request["max_tokens"] for request in requests),
        "answers": answers,
    }


def _manager(model: Any) -> Any:
    """Its memory is taken once, by the first request."""
    config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=2048)
    manager = model.init_continuous_batching(generation_config=config)
    manager.start()
    return manager


def _continuous(manager: Any, requests: list[Message]) -> Message:
    began = time.perf_counter()
    for index, request in enumerate(requests):
        manager.add_request(
            request["prompt"], request_id=str(index), max_new_tokens=request["max_tokens"], eos_token_id=-1
        )
    tokens = 0
    for _ in requests:
        result = manager.get_result(timeout=600)
        if result is None or result.error:
            raise RuntimeError(f"continuous batching gave no result: {result and result.error}")
        tokens += len(result.generated_tokens)
    return {"seconds": time.perf_counter() - began, "tokens": tokens, "answers": []}
