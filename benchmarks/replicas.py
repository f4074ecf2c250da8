"""What choosing a replica by prefix gives: cache hits and evenness of several replicas against one's.

Real routers and schedulers in this process, and shards that answer at once, so that it takes seconds. The
clients of `--routers` routers ask in turn, `--concurrency` at a time, and begin with one of `--systems`
system messages, some far more popular than others. `hit_ratio` is the share of prompt tokens found in the
prefix cache; `imbalance` what the busiest replica computed, over the mean.
"""

import asyncio
import itertools
import json
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import grpc

from benchmarks.command import BareParser, failing_in_one_line, positive_int
from benchmarks.instant_shard import VOCAB_SIZE, InstantShard
from benchmarks.random_model import random_model
from common.probes import Probes
from common.rpc import SERVER_OPTIONS, bind
from pagoda.scheduler.v1 import scheduler_pb2_grpc
from pagoda.v1 import inference_pb2 as pb
from pagoda.v1.inference_pb2_grpc import InferenceServiceStub
from router.config import RouterConfig
from router.server import Router
from scheduler.config import SchedulerConfig
from scheduler.engine import Engine
from scheduler.service import SchedulerService

BLOCK_SIZE = 16
NUM_BLOCKS = 50_000
OUTPUT_TOKENS = 32
QUESTION_TOKENS = (20, 300)
SYSTEM_TOKENS = (200, 1500)
# Of the router's model, whose tokenizer is not used.
VOCAB = 500


class Replica:
    """One scheduler and its shard."""

    def __init__(self) -> None:
        self.shard = InstantShard(NUM_BLOCKS, BLOCK_SIZE)
        self.shard.stream.may_answer = asyncio.Semaphore(VOCAB_SIZE**2)
        config = SchedulerConfig(shard_addresses=("none",), max_waiting_requests=1 << 16)
        self.engine = Engine(config, self.shard, Probes())

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Its address."""
        service = SchedulerService(self.engine)
        server = grpc.aio.server(options=SERVER_OPTIONS)
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(service, server)
        port = bind(server, "127.0.0.1:0")
        await server.start()
        loop = asyncio.create_task(self.engine.run())
        try:
            yield f"127.0.0.1:{port}"
        finally:
            service.close_streams()
            loop.cancel()
            with suppress(asyncio.CancelledError):
                await loop
            await server.stop(0)


def prompts(requests: int, systems: int) -> list[list[int]]:
    """Of every request: a system message, by Zipf's law, and a question of its own."""
    rng = random.Random(5)  # noqa: S311

    def text(lengths: tuple[int, int]) -> list[int]:
        return [rng.randrange(2, VOCAB) for _ in range(rng.randint(*lengths))]

    messages = [text(SYSTEM_TOKENS) for _ in range(systems)]
    popularity = [1 / rank for rank in range(1, systems + 1)]
    return [[*message, *text(QUESTION_TOKENS)] for message in rng.choices(messages, popularity, k=requests)]


async def measure(
    asked: Sequence[list[int]], replicas: int, routers: int, concurrency: int
) -> dict[str, Any]:
    """One JSON line."""
    model = str(random_model("tiny", "float32"))
    async with AsyncExitStack() as stack:
        fleet = [Replica() for _ in range(replicas)]
        addresses = tuple([await stack.enter_async_context(one.serving()) for one in fleet])
        stubs = itertools.cycle([await _router(stack, model, addresses) for _ in range(routers)])
        waiting = iter(asked)

        async def client() -> None:
            for prompt in waiting:
                spec = pb.GenerateSpec(
                    token_ids=pb.TokenIds(ids=prompt),
                    stop=pb.StopConditions(max_tokens=OUTPUT_TOKENS, ignore_eos=True),
                )
                await next(stubs).Generate(pb.GenerateRequest(spec=spec))

        await asyncio.gather(*(client() for _ in range(concurrency)))
        totals = [one.engine.scheduler.totals for one in fleet if one.engine.scheduler]
        computed = [one.shard.stream.computed for one in fleet]
        return {
            "replicas": replicas,
            "routers": routers,
            "requests": len(asked),
            "hit_ratio": round(sum(one.hit_tokens for one in totals) / sum(map(len, asked)), 4),
            "imbalance": round(max(computed) * replicas / sum(computed), 3),
            "computed_tokens": computed,
        }


async def _router(stack: AsyncExitStack, model: str, addresses: tuple[str, ...]) -> Any:
    router = Router(
        RouterConfig(
            model=model,
            scheduler_addresses=addresses,
            listen_address="127.0.0.1:0",
            http_address="",
            max_concurrent_requests=1 << 16,
        )
    )
    await router.start()
    stack.push_async_callback(router.close)
    while len(router.replicas.available) < len(addresses):
        await router.replicas.wait_change()
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{router.port}")
    await stack.enter_async_context(channel)
    return InferenceServiceStub(channel)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a line for one replica, and one for several with what they reach of it."""
    parser = BareParser("replicas", __doc__)
    parser.add_argument("--replicas", type=positive_int, default=4, help="schedulers, against one")
    parser.add_argument("--routers", type=positive_int, default=2, help="routers before them")
    parser.add_argument("--requests", type=positive_int, default=3000, help="in all")
    parser.add_argument("--concurrency", type=positive_int, default=256, help="requests at once")
    parser.add_argument("--systems", type=positive_int, default=40, help="system messages")
    options = parser.parse_args(arguments)
    with failing_in_one_line(parser.prog):
        asked = prompts(options.requests, options.systems)
        lines = [
            asyncio.run(measure(asked, replicas, options.routers, options.concurrency))
            for replicas in (1, options.replicas)
        ]
        # One request or unlike ones find nothing in any cache.
        best = lines[0]["hit_ratio"]
        lines[1]["of_one_replica"] = round(lines[1]["hit_ratio"] / best, 4) if best else None
        for line in lines:
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
