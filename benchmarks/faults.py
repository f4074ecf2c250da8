"""What clients notice of faults: real processes, killed, hung, cut off from each other, out of memory.

Each fault strikes while `--requests` streams run, half of them greedy and half sampled with a seed, in
float32. `lost` are those that didn't end well, `changed` those whose tokens aren't an undisturbed run's;
both are to be 0. `recovery_s` is the longest pause between two tokens of any stream. Clients resume, as
docs/clients.md says, when their router is lost.
"""

import asyncio
import json
import random
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import grpc

from benchmarks.cluster import Cluster, LaunchedCluster, Layout, Replica, until
from benchmarks.command import BareParser, BenchmarkError, failing_in_one_line, positive_int
from benchmarks.faulty_shard import POISON, TOO_LARGE
from benchmarks.random_model import MAX_MODEL_LEN, SHAPES, random_model
from benchmarks.resuming_client import Clients, ResumingStream
from benchmarks.tcp_proxy import TcpProxy
from pagoda.v1 import inference_pb2 as pb
from pagoda.v1.sampling_pb2 import SamplingParams

# Beside what gRPC's keepalive takes to see that nobody is there: 30 s, and 10 s for an answer.
HALF_OPEN_WITHIN_S: Final = 60.0
HANG_S: Final = 35.0
QUICK_HANG_S: Final = 1.0
STEP_TIMEOUT_S: Final = 20.0
QUICK_STEP_TIMEOUT_S: Final = 1.5
LAUNCHER: Final = "launcher serve"
QUICK_LAUNCHER: Final = "benchmarks.impatient_launcher"
_STRUCK_AFTER: Final = 10
_PROMPT_TOKENS: Final = 40
_LOSSES: Final = "pagoda_scheduler_shard_losses_total"
_RECONNECTS: Final = "pagoda_router_scheduler_reconnects_total"


class Run:
    """A cluster while a fault is on, and its clients.

    Attributes:
        hang_s: How long something hung is borne.
        extra: Streams that belong to the fault, by how they are to end.
    """

    def __init__(self, cluster: Cluster, clients: Clients, hang_s: float) -> None:
        self.cluster = cluster
        self.hang_s = hang_s
        self.extra: dict[ResumingStream, grpc.StatusCode] = {}
        self._clients = clients

    @property
    def replica(self) -> Replica:
        """The one that is struck; there is none under a launcher."""
        return self.cluster.replicas[0]

    def submit(self, prompt: Sequence[int], code: grpc.StatusCode) -> ResumingStream:
        """A request of the fault's own."""
        stream = self._clients.stream(request(prompt, 20, None))
        self.extra[stream] = code
        return stream

    def losses(self) -> float:
        """How often the scheduler lost its shard."""
        return self.replica.scheduler.metric(_LOSSES)


Fault = Callable[[Run], Awaitable[None]]


async def shard_killed(run: Run) -> None:
    run.replica.shards[-1].send(signal.SIGKILL)


async def scheduler_killed(run: Run) -> None:
    run.replica.scheduler.send(signal.SIGKILL)


async def router_killed(run: Run) -> None:
    run.cluster.routers[0].send(signal.SIGKILL)


async def shard_hung_for_a_while(run: Run) -> None:
    before = run.losses()
    run.replica.shards[0].send(signal.SIGSTOP)
    await until(lambda: run.losses() > before, "the hung shard was not noticed")
    run.replica.shards[0].send(signal.SIGCONT)


async def shard_hung_for_good(run: Run) -> None:
    """As a supervisor does that finds its liveness probe unanswered."""
    run.replica.shards[0].send(signal.SIGSTOP)
    await asyncio.sleep(run.hang_s)
    run.replica.shards[0].send(signal.SIGKILL)


async def scheduler_hung_for_good(run: Run) -> None:
    run.replica.scheduler.send(signal.SIGSTOP)
    await asyncio.sleep(run.hang_s)
    run.replica.scheduler.send(signal.SIGKILL)


async def launched_shard_hung(run: Run) -> None:
    await _hung_under_launcher(run, "shard")


async def launched_scheduler_hung(run: Run) -> None:
    await _hung_under_launcher(run, "scheduler")


async def _hung_under_launcher(run: Run, name: str) -> None:
    """For good: it is the launcher that finds its liveness probe unanswered."""
    cluster = run.cluster
    if not isinstance(cluster, LaunchedCluster) or (hung := cluster.child(name)) is None:
        raise BenchmarkError(f"no launcher runs a {name}")
    hung.send_signal(signal.SIGSTOP)
    await until(lambda: cluster.child(name) not in (hung, None), f"the hung {name} was not replaced")


async def router_connection_dropped(run: Run) -> None:
    run.replica.scheduler_link.drop()


async def shard_connection_dropped(run: Run) -> None:
    run.replica.shard_links[0].drop()


async def router_connection_half_open(run: Run) -> None:
    def reconnects() -> float:
        return sum(router.metric(_RECONNECTS) for router in run.cluster.routers)

    before, routers = reconnects(), len(run.cluster.routers)
    await _half_open(run.replica.scheduler_link, lambda: reconnects() >= before + routers)


async def shard_connection_half_open(run: Run) -> None:
    before = run.losses()
    await _half_open(run.replica.shard_links[0], lambda: run.losses() > before)


async def _half_open(link: TcpProxy, noticed: Callable[[], bool]) -> None:
    link.swallow()
    try:
        await until(noticed, "the half-open connection was not noticed", HALF_OPEN_WITHIN_S)
    finally:
        link.heal()


async def slow_network(run: Run) -> None:
    links = [run.replica.scheduler_link, *run.replica.shard_links]
    for link in links:
        link.delay_s = 0.05
    await asyncio.sleep(run.hang_s)
    for link in links:
        link.heal()


async def tiny_windows(run: Run) -> None:
    """A thousandth of what TCP passes at once, on new connections."""
    links = [run.replica.scheduler_link, *run.replica.shard_links]
    for link in links:
        link.window_bytes = 64
        link.drop()
    await asyncio.sleep(run.hang_s)
    for link in links:
        link.heal()


async def out_of_memory(run: Run) -> None:
    await run.submit(TOO_LARGE, grpc.StatusCode.OK).task


async def poisonous_request(run: Run) -> None:
    await run.submit(POISON, grpc.StatusCode.INTERNAL).task


async def replicas_replaced(run: Run) -> None:
    """One by one, as a rolling update does it: drained, ended at the end of grace, and started anew."""
    for replica in run.cluster.replicas:
        members = [replica.scheduler, *replica.shards]
        starts = [member.starts for member in members]
        for member in members:
            member.send(signal.SIGTERM)
        await until(
            lambda members=members, starts=starts: all(  # type: ignore[misc]
                member.starts > before and member.ready()
                for member, before in zip(members, starts, strict=True)
            ),
            "the replica was not replaced",
        )


QUICK: Final[dict[str, Fault]] = {
    fault.__name__: fault
    for fault in (
        shard_killed,
        scheduler_killed,
        router_killed,
        shard_hung_for_a_while,
        shard_hung_for_good,
        scheduler_hung_for_good,
        router_connection_dropped,
        shard_connection_dropped,
        slow_network,
        tiny_windows,
        out_of_memory,
        poisonous_request,
    )
}
# Those that take a minute, and those of a tensor-parallel group, of a launcher and of several replicas.
SLOW: Final[dict[str, Fault]] = {
    fault.__name__: fault for fault in (router_connection_half_open, shard_connection_half_open)
}
OF_RANKS: Final[dict[str, Fault]] = {"rank_killed": shard_killed}
OF_LAUNCHER: Final[dict[str, Fault]] = {
    fault.__name__: fault for fault in (launched_shard_hung, launched_scheduler_hung)
}
OF_REPLICAS: Final[dict[str, Fault]] = {"replicas_replaced": replicas_replaced}


def request(prompt: Sequence[int], max_tokens: int, seed: int | None) -> pb.GenerateSpec:
    """Greedy without a seed."""
    return pb.GenerateSpec(
        token_ids=pb.TokenIds(ids=prompt),
        sampling=SamplingParams(temperature=0 if seed is None else 1, seed=seed),
        stop=pb.StopConditions(max_tokens=max_tokens, ignore_eos=True),
    )


def requests(count: int, max_tokens: int) -> list[pb.GenerateSpec]:
    """Half of them greedy, half sampled: two by two, so that each of two routers gets both."""
    rng = random.Random(5)  # noqa: S311
    vocab = SHAPES["tiny"]["vocab_size"]
    prompts = [[rng.randrange(8, vocab) for _ in range(_PROMPT_TOKENS)] for _ in range(count)]
    return [
        request(prompt, max_tokens, index if index // 2 % 2 else None) for index, prompt in enumerate(prompts)
    ]


async def strike(
    cluster: Cluster,
    name: str,
    fault: Fault,
    specs: Sequence[pb.GenerateSpec],
    expected: Sequence[Sequence[int]],
    hang_s: float,
) -> dict[str, Any]:
    """One JSON line."""
    clients = Clients(cluster.addresses)
    try:
        streams = [clients.stream(spec) for spec in specs]
        await asyncio.gather(*(stream.wait_tokens(_STRUCK_AFTER) for stream in streams))
        struck = sum(stream.code is None for stream in streams)
        for stream in streams:
            stream.watch()
        run = Run(cluster, clients, hang_s)
        await fault(run)
        await asyncio.gather(*(stream.task for stream in [*streams, *run.extra]))
        await cluster.wait_ready()
    finally:
        await clients.close()
    lost = [stream for stream in streams if stream.code is not grpc.StatusCode.OK or stream.ends != 1]
    lost += [stream for stream, code in run.extra.items() if stream.code is not code]
    changed = [
        one
        for one, token_ids in zip(streams, expected, strict=True)
        if one not in lost and one.token_ids != token_ids
    ]
    for stream in lost:
        print(f"{name}: {stream.code}: {stream.message}", file=sys.stderr)
    return {
        "fault": name,
        "requests": len(streams) + len(run.extra),
        "struck": struck,
        "lost": len(lost),
        "changed": len(changed),
        "recovery_s": round(max(stream.longest_pause_s for stream in streams), 2),
    }


async def undisturbed(cluster: Cluster, specs: Sequence[pb.GenerateSpec]) -> list[list[int]]:
    """The tokens of each request.

    Raises:
        BenchmarkError: one doesn't end well though nothing fails.
    """
    clients = Clients(cluster.addresses)
    streams = [clients.stream(spec) for spec in specs]
    await asyncio.gather(*(stream.task for stream in streams))
    await clients.close()
    for stream in streams:
        if stream.code is not grpc.StatusCode.OK:
            raise BenchmarkError(f"a request fails without a fault, with {stream.code}: {stream.message}")
    return [stream.token_ids for stream in streams]


async def run(
    faults: dict[str, Fault],
    specs: Sequence[pb.GenerateSpec],
    hang_s: float,
    step_timeout_s: float,
    replicas: int = 1,
    ranks: int = 1,
) -> list[dict[str, Any]]:
    """All of `faults` in turn, on one cluster."""
    layout = Layout(
        random_model("tiny", "float32"),
        replicas=replicas,
        ranks=ranks,
        shard_module="benchmarks.faulty_shard",
        scheduler_flags=(("step-timeout", step_timeout_s),),
    )
    return await strike_each(Cluster(layout), faults, specs, hang_s)


async def run_launched(
    faults: dict[str, Fault], specs: Sequence[pb.GenerateSpec], program: str
) -> list[dict[str, Any]]:
    """All of `faults` in turn, on what one launcher, or `program` in its place, keeps running."""
    layout = Layout(random_model("tiny", "float32"))
    return await strike_each(LaunchedCluster(layout, program), faults, specs, 0.0)


async def strike_each(
    group: Cluster, faults: dict[str, Fault], specs: Sequence[pb.GenerateSpec], hang_s: float
) -> list[dict[str, Any]]:
    """One JSON line for each fault, printed as it comes."""
    lines = []
    async with group as cluster:
        expected = await undisturbed(cluster, specs)
        for name, fault in faults.items():
            lines.append(await strike(cluster, name, fault, specs, expected, hang_s))
            print(json.dumps(lines[-1]), flush=True)
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one JSON line per fault; exits with 1 if anything was lost or changed."""
    parser = BareParser("faults", __doc__)
    every = {**QUICK, **OF_RANKS, **OF_LAUNCHER, **OF_REPLICAS, **SLOW}
    parser.add_argument("--quick", action="store_true", help="hang for seconds, leave out what takes minutes")
    parser.add_argument("--only", nargs="+", choices=list(every), metavar="FAULT", help=", ".join(every))
    parser.add_argument("--requests", type=positive_int, default=8, help="streams at once")
    parser.add_argument("--max-tokens", type=positive_int, default=600, help="output of each")
    options = parser.parse_args(arguments)
    most = MAX_MODEL_LEN - _PROMPT_TOKENS
    if options.max_tokens > most:
        parser.error(f"argument --max-tokens: must be at most {most}, not {options.max_tokens}")
    if options.quick and (slow := [name for name in options.only or () if name in SLOW]):
        parser.error(f"argument --only: {slow[0]} takes minutes; leave out --quick")
    specs = requests(options.requests, options.max_tokens)
    hang_s, step_timeout_s = (
        (QUICK_HANG_S, QUICK_STEP_TIMEOUT_S) if options.quick else (HANG_S, STEP_TIMEOUT_S)
    )
    wanted = options.only or [name for name in every if not (options.quick and name in SLOW)]
    lines = []
    with failing_in_one_line(parser.prog):
        for some, replicas, ranks in (({**QUICK, **SLOW}, 1, 1), (OF_RANKS, 1, 2), (OF_REPLICAS, 2, 1)):
            if chosen := {name: some[name] for name in wanted if name in some}:
                lines += asyncio.run(run(chosen, specs, hang_s, step_timeout_s, replicas, ranks))
        if chosen := {name: OF_LAUNCHER[name] for name in wanted if name in OF_LAUNCHER}:
            program = QUICK_LAUNCHER if options.quick else LAUNCHER
            lines += asyncio.run(run_launched(chosen, specs, program))
    if any(line["lost"] or line["changed"] for line in lines):
        sys.exit(1)


if __name__ == "__main__":
    main()
