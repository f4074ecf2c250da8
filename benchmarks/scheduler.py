"""What a step costs outside the shard: the real engine, scheduler and service, without a model or a network.

A decode step of N running sequences, all of one router, from one result to the next: planning (`plan_us`),
the policy's handling of the result (`process_us`), and the rest (`deliver_us`), which is the engine's loop,
the router's outbox, its stream and serialising the StepOutputs message. The shard's own work is taken off.
All of it is one thread that never waits, and is measured in its processor time, so that other work on the
machine matters little. Garbage collection is as the scheduler process sets it.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from statistics import median
from typing import Any, ParamSpec, TypeVar, cast

import grpc

from benchmarks.command import BareParser, failing_in_one_line, positive_int
from benchmarks.instant_shard import VOCAB_SIZE, InstantShard
from common.lifecycle import calm_garbage_collector
from common.probes import Probes
from common.version import PROTOCOL_VERSION
from pagoda.scheduler.v1.scheduler_pb2 import Hello, RequestKey, ServeRequest, ServeResponse, Submit
from pagoda.v1.sampling_pb2 import SamplingParams
from scheduler.config import SchedulerConfig
from scheduler.engine import Engine
from scheduler.scheduler import Scheduler
from scheduler.service import SchedulerService

BLOCK_SIZE = 16
PROMPT_LENGTH = 128
WARM_UP_STEPS = 20

P = ParamSpec("P")
R = TypeVar("R")


class Stopwatch:
    """Wraps a function, and sums the seconds spent in it."""

    def __init__(self) -> None:
        self.total_s = 0.0

    def wrap(self, function: Callable[P, R]) -> Callable[P, R]:
        """The same function, timed."""

        def timed(*args: P.args, **kwargs: P.kwargs) -> R:
            started = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.total_s += time.thread_time() - started

        return timed


async def _requests(running: int, max_tokens: int) -> AsyncIterator[ServeRequest]:
    yield ServeRequest(hello=Hello(protocol_version=PROTOCOL_VERSION, router_id="benchmark"))
    sampling = SamplingParams(temperature=1, top_p=1, repetition_penalty=1)
    for index in range(running):
        prompt = [(index * 31 + position) % VOCAB_SIZE for position in range(PROMPT_LENGTH)]
        key = RequestKey(request_id=f"benchmark-request-{index}", attempt=1)
        submit = Submit(key=key, prompt_token_ids=prompt, max_tokens=max_tokens, n=1, sampling=sampling)
        yield ServeRequest(submit=submit)
    await asyncio.Event().wait()


async def measure(running: int, steps: int) -> dict[str, float]:
    """Medians over `steps` decode steps, in microseconds."""
    max_tokens = 2 * steps + 4 * WARM_UP_STEPS + 2 * running
    num_blocks = running * -(-(PROMPT_LENGTH + max_tokens) // BLOCK_SIZE)
    num_blocks += num_blocks // 50
    shard = InstantShard(num_blocks, BLOCK_SIZE)
    config = SchedulerConfig(
        shard_addresses=("none",), max_num_seqs=running, max_waiting_requests=2 * running
    )
    engine = Engine(config, shard, Probes())
    loop = asyncio.create_task(engine.run())
    await engine.ready.wait()
    assert engine.scheduler  # noqa: S101
    plan, process = _instrument(engine.scheduler)
    context = cast("grpc.aio.ServicerContext[ServeRequest, ServeResponse]", None)
    messages = SchedulerService(engine).Serve(_requests(running, max_tokens), context)
    samples: list[tuple[float, ...]] = []
    decoding = 0
    last: tuple[float, ...] = ()
    async for message in messages:
        message.SerializeToString()
        if not message.HasField("outputs"):
            continue
        now = (time.thread_time(), shard.stream.busy_s, plan.total_s, process.total_s)
        decoding += len(message.outputs.handles) == running
        if decoding > WARM_UP_STEPS:
            samples.append(tuple(after - before for after, before in zip(now, last, strict=True)))
        last = now
        if len(samples) == steps:
            break
        shard.stream.may_answer.release()
    await messages.aclose()  # type: ignore[attr-defined]
    loop.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await loop
    return _summary(samples)


def _instrument(scheduler: Scheduler) -> tuple[Stopwatch, Stopwatch]:
    plan, process = Stopwatch(), Stopwatch()
    instance: Any = scheduler
    instance.plan = plan.wrap(scheduler.plan)
    instance.process = process.wrap(scheduler.process)
    return plan, process


def _summary(samples: Sequence[tuple[float, ...]]) -> dict[str, float]:
    steps = [(wall - shard, plan, process) for wall, shard, plan, process in samples]
    columns = {
        "step_us": [step for step, _, _ in steps],
        "plan_us": [plan for _, plan, _ in steps],
        "process_us": [process for _, _, process in steps],
        "deliver_us": [step - plan - process for step, plan, process in steps],
    }
    return {name: round(median(seconds) * 1e6, 1) for name, seconds in columns.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one JSON line per number of running sequences."""
    parser = BareParser("scheduler", __doc__)
    parser.add_argument("--running", type=positive_int, nargs="+", default=[64, 256, 1024], help="sequences")
    parser.add_argument("--steps", type=positive_int, default=300, help="decode steps measured, each time")
    options = parser.parse_args(arguments)
    calm_garbage_collector()
    with failing_in_one_line(parser.prog):
        for running in options.running:
            line = {"running": running, **asyncio.run(measure(running, options.steps))}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
