"""Mixed load for a while, with clients that leave or read slowly, and processes that are killed or replaced.

Two routers and two replicas of a tiny random model, in float32. At the end every request that its client
didn't leave must have ended once, with the tokens of an undisturbed run, and no block may be held. Memory is
that of the processes at the end, and after a quarter of the time.
"""

import asyncio
import json
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import grpc

from benchmarks.cluster import Cluster, Layout, Member, until
from benchmarks.command import BareParser, failing_in_one_line, positive_float, positive_int
from benchmarks.faults import request, undisturbed
from benchmarks.random_model import SHAPES, random_model
from benchmarks.resuming_client import Clients
from pagoda.v1 import inference_pb2 as pb

KINDS: Final = 24
_LEAVES, _READS_SLOWLY = 0.2, 0.1
_SLOW_S: Final = 0.05
_BETWEEN_BLOWS_S: Final = (2.0, 6.0)
_IDLE_WITHIN_S: Final = 60.0


class Soak:
    """A cluster under load.

    Attributes:
        counts: Requests by how they ended, and blows by what was struck.
    """

    def __init__(self, cluster: Cluster, specs: Sequence[pb.GenerateSpec], seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self._cluster = cluster
        self._specs = specs
        self._expected: list[list[int]] = []
        self._rng = random.Random(seed)  # noqa: S311

    async def run(self, seconds: float, clients: int) -> dict[str, Any]:
        """Runs for so long; then everything ends. Returns the JSON line."""
        self._expected = await undisturbed(self._cluster, self._specs)
        connections = Clients(self._cluster.addresses)
        ends_at = time.monotonic() + seconds
        load = [asyncio.create_task(self._ask(connections, ends_at)) for _ in range(clients)]
        blows = asyncio.create_task(self._strike(ends_at))
        await asyncio.sleep(seconds / 4)
        early = self._memory()
        await asyncio.gather(blows, *load)
        await connections.close()
        await self._cluster.wait_ready()
        schedulers = [replica.scheduler for replica in self._cluster.replicas]
        await until(lambda: not _held(schedulers), "blocks are held though nothing runs", _IDLE_WITHIN_S)
        return {**self.counts, "memory_mib_early": early, "memory_mib": self._memory()}

    async def _ask(self, clients: Clients, ends_at: float) -> None:
        while time.monotonic() < ends_at:
            index = self._rng.randrange(len(self._specs))
            leaves = self._rng.random() < _LEAVES
            pause_s = _SLOW_S if self._rng.random() < _READS_SLOWLY else 0.0
            stream = clients.stream(self._specs[index], pause_s)
            self.counts["requests"] += 1
            if leaves:
                await stream.wait_tokens(self._rng.randrange(1, 20))
                stream.task.cancel()
                await asyncio.gather(stream.task, return_exceptions=True)
                self.counts["left"] += 1
                continue
            await stream.task
            if stream.code is not grpc.StatusCode.OK or stream.ends != 1:
                print(f"{stream.code}, {stream.ends} ends: {stream.message}", file=sys.stderr)
                self.counts["lost"] += 1
            elif stream.token_ids != self._expected[index]:
                self.counts["changed"] += 1
            else:
                self.counts["answered"] += 1

    async def _strike(self, ends_at: float) -> None:
        while (pause_s := self._rng.uniform(*_BETWEEN_BLOWS_S)) < ends_at - time.monotonic():
            await asyncio.sleep(pause_s)
            name, member = self._rng.choice(self._members())
            # A shard that is asked to end stays for its scheduler.
            hows = [signal.SIGKILL] if name == "shard" else [signal.SIGKILL, signal.SIGTERM]
            how = self._rng.choice(hows)
            before = member.starts
            member.send(how)
            self.counts[f"{name}_{how.name.lower()}"] += 1
            await until(lambda member=member, before=before: member.starts > before, f"{name} stays away")  # type: ignore[misc]
            await self._cluster.wait_ready()

    def _members(self) -> list[tuple[str, Member]]:
        replicas = self._cluster.replicas
        schedulers = [("scheduler", replica.scheduler) for replica in replicas]
        shards = [("shard", shard) for replica in replicas for shard in replica.shards]
        return [*schedulers, *shards, *(("router", router) for router in self._cluster.routers)]

    def _memory(self) -> dict[str, int]:
        """The largest process of each kind, in MiB."""
        sizes: dict[str, int] = {}
        for name, member in self._members():
            # One that was struck may be away.
            with suppress(FileNotFoundError):
                pages = int(Path(f"/proc/{member.pid}/statm").read_text().split()[1])
                sizes[name] = max(sizes.get(name, 0), pages * 4096 >> 20)
        return sizes


def _held(schedulers: Sequence[Member]) -> float:
    """Blocks in tables, and sequences that run or wait."""
    names = (
        'pagoda_kv_blocks{state="used"',
        "pagoda_scheduler_running_sequences",
        "pagoda_scheduler_waiting_sequences",
    )
    return sum(scheduler.metric(name) for scheduler in schedulers for name in names)


def specs(seed: int) -> list[pb.GenerateSpec]:
    """Short and long, greedy and sampled; some begin alike."""
    rng = random.Random(seed)  # noqa: S311
    vocab = SHAPES["tiny"]["vocab_size"]
    common = [rng.randrange(8, vocab) for _ in range(48)]
    made = []
    for index in range(KINDS):
        prompt = [rng.randrange(8, vocab) for _ in range(rng.randrange(4, 120))]
        prompt = [*common, *prompt] if index % 3 == 0 else prompt
        made.append(request(prompt, rng.randrange(4, 240), index if index % 2 else None))
    return made


async def run(seconds: float, clients: int, seed: int) -> dict[str, Any]:
    """The JSON line of one soak."""
    layout = Layout(random_model("tiny", "float32"), replicas=2, routers=2)
    async with Cluster(layout) as cluster:
        soak = Soak(cluster, specs(seed), seed)
        found = await soak.run(seconds, clients)
    return {"seconds": seconds, "lost": 0, "changed": 0, **found}


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a JSON line; exits with 1 if anything was lost or changed."""
    parser = BareParser("soak", __doc__)
    parser.add_argument("--minutes", type=positive_float, default=10.0, help="how long there is load")
    parser.add_argument("--clients", type=positive_int, default=12, help="that ask at once")
    parser.add_argument("--seed", type=int, default=0, help="of what is asked and struck")
    options = parser.parse_args(arguments)
    with failing_in_one_line(parser.prog):
        line = asyncio.run(run(60 * options.minutes, options.clients, options.seed))
    print(json.dumps(line), flush=True)
    if line["lost"] or line["changed"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
