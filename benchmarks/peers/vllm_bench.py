"""vLLM's load generator, `vllm bench serve`, past a command line that wants its package to be named vllm."""

import argparse
import asyncio
from collections.abc import Callable
from typing import Any

from vllm.benchmarks.serve import add_cli_args, main_async

Message = dict[str, Any]


def load(options: Message) -> Callable[[Message], Message]:
    """Of `options`, the folder of the tokenizer and the model's name at the server."""
    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    common = ["--backend", "openai", "--tokenizer", options["model"], "--model", options["served_model_name"]]
    common += ["--dataset-name", "random", "--ignore-eos", "--disable-tqdm"]

    def run(message: Message) -> Message:
        """Its flags in, its figures out: tokens a second, and milliseconds."""
        said = asyncio.run(main_async(parser.parse_args([*common, *message["flags"]])))
        wanted = ("completed", "failed", "total_output_tokens", "output_throughput")
        times = ("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms")
        return {name: said[name] for name in (*wanted, *times)}

    return run
