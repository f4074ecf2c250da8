"""A shard with two bad prompts: `python -m benchmarks.faulty_shard`, with the flags of `python -m shard`.

A prompt that begins with `POISON` ends the process, each time; one that begins with `TOO_LARGE` fails its
step for want of memory, once.
"""

import os
from typing import Final

from pagoda.shard.v1.shard_pb2 import ExecuteRequest
from shard.executor import StepExecutor
from shard.results import StepResult
from shard.server import main

POISON: Final = [3] * 8
TOO_LARGE: Final = [4] * 8

_execute = StepExecutor.execute
_refused: list[int] = []


def execute(self: StepExecutor, command: ExecuteRequest) -> StepResult:
    """As the real one, but for the bad prompts."""
    beginnings = [list(join.token_ids[: len(POISON)]) for join in command.joins]
    if POISON in beginnings:
        os._exit(139)
    if TOO_LARGE in beginnings and not _refused:
        _refused.append(command.step)
        raise MemoryError("can't allocate for this prompt")
    return _execute(self, command)


if __name__ == "__main__":
    StepExecutor.execute = execute  # type: ignore[method-assign]
    main()
