"""Routers, schedulers and shards as processes on this machine, with a proxy on each link between them.

A process that ends is started again, as a supervisor would.
"""

import asyncio
import os
import signal
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import psutil

from benchmarks.command import BenchmarkError
from benchmarks.results import ROOT
from benchmarks.tcp_proxy import TcpProxy
from launcher.preflight import claim_addresses

READY_WITHIN_S: Final = 120.0
_RESTART_DELAY_S: Final = 0.2
_POLL_S: Final = 0.05
_CLOSE_WITHIN_S: Final = 20.0


class Member:
    """One process at a time that runs a module of ours, and its log."""

    def __init__(self, module: str, flags: Mapping[str, object], log: Path) -> None:
        """`flags` must have the metrics address; `port` 0 is not for here, as restarts keep addresses.

        A word after the module is its command.
        """
        # A launcher's router is ready last.
        self.metrics = str(flags.get("metrics-address") or flags["router-metrics-address"])
        self.starts = 0
        self.log = log
        options = [f"--{name}={value}" for name, value in flags.items()]
        self._argv = [sys.executable, "-m", *module.split(), *options]
        self._process: asyncio.subprocess.Process | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._kept = True

    async def start(self) -> None:
        """Starts it, and again whenever it ends."""
        await self._start()
        self._keeping = asyncio.create_task(self._keep())

    async def _start(self) -> None:
        self.starts += 1
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._argv,
                "--exit-with-parent",
                cwd=ROOT,
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )

    async def _keep(self) -> None:
        while self._process:
            await self._process.wait()
            await asyncio.sleep(_RESTART_DELAY_S)
            if not self._kept:
                return
            await self._start()

    def send(self, number: signal.Signals) -> None:
        """A signal."""
        if self._process:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    @property
    def pid(self) -> int:
        """Of the process that runs now."""
        assert self._process  # noqa: S101
        return self._process.pid

    async def wait_ready(self) -> None:
        """Until its readiness probe says so."""
        await until(self.ready, f"{self.log.stem} is not ready")

    def ready(self) -> bool:
        """What its readiness probe says."""
        with suppress(OSError), urllib.request.urlopen(f"http://{self.metrics}/readyz", timeout=1) as answer:
            return bool(answer.status == 200)
        return False

    def metric(self, name: str) -> float:
        """The sum of the samples that begin with `name`, which may have labels; 0 while it is down."""
        with suppress(OSError), urllib.request.urlopen(f"http://{self.metrics}/metrics", timeout=2) as answer:
            lines = answer.read().decode().splitlines()
            return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))
        return 0.0

    async def stop(self) -> None:
        """Ends it for good: with SIGTERM, and with SIGKILL if that takes too long."""
        self._kept = False
        self.send(signal.SIGTERM)
        self.send(signal.SIGCONT)
        if not self._keeping:
            return
        done, _ = await asyncio.wait({self._keeping}, timeout=_CLOSE_WITHIN_S)
        if not done:
            self.send(signal.SIGKILL)
            await self._keeping


@dataclass(frozen=True)
class Layout:
    """How many of what, and how they are started."""

    model: Path
    replicas: int = 1
    ranks: int = 1
    routers: int = 2
    shard_module: str = "shard"
    scheduler_flags: tuple[tuple[str, object], ...] = ()
    router_flags: tuple[tuple[str, object], ...] = ()


@dataclass(frozen=True)
class Replica:
    """A scheduler, its shards by rank, and the proxies in front of each."""

    scheduler: Member
    shards: list[Member]
    scheduler_link: TcpProxy
    shard_links: list[TcpProxy]


class Cluster:
    """All processes of a layout, as a context."""

    def __init__(self, layout: Layout) -> None:
        self.replicas: list[Replica] = []
        self.routers: list[Member] = []
        # Where clients connect, one per router.
        self.addresses: list[str] = []
        self._layout = layout
        self._stack = AsyncExitStack()
        self._folder = Path()

    async def __aenter__(self) -> Self:
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        try:
            await self._start_all()
            await self.wait_ready()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def _start_all(self) -> None:
        for index in range(self._layout.replicas):
            self.replicas.append(await self._start_replica(index))
        for index in range(self._layout.routers):
            await self._start_router(index)

    async def wait_ready(self) -> None:
        """Until all that serves does so."""
        members = [*(one.scheduler for one in self.replicas), *self.routers]
        await asyncio.gather(*(member.wait_ready() for member in members))

    def logs(self) -> str:
        """The end of every log."""
        return "\n".join(
            f"{log.name}:\n{log.read_text(errors='replace')[-4000:]}" for log in self._folder.glob("*.log")
        )

    async def _start_replica(self, index: int) -> Replica:
        layout = self._layout
        shards, links = [], []
        for rank in range(layout.ranks):
            addresses = _free("listen-address", "metrics-address")
            flags = {
                "model": layout.model,
                "device": "cpu",
                "dtype": "float32",
                "kv-cache-memory-bytes": 1 << 26,
                "tensor-parallel-size": layout.ranks,
                "rank": rank,
                **addresses,
            }
            shards.append(await self._start(layout.shard_module, flags, f"shard-{index}-{rank}"))
            links.append(await self._proxy(addresses["listen-address"]))
        addresses = _free("listen-address", "metrics-address")
        flags = {
            "shard-addresses": ",".join(link.address for link in links),
            "shutdown-grace": 2,
            **dict(layout.scheduler_flags),
            **addresses,
        }
        scheduler = await self._start("scheduler", flags, f"scheduler-{index}")
        return Replica(scheduler, shards, await self._proxy(addresses["listen-address"]), links)

    async def _start_router(self, index: int) -> None:
        addresses = _free("listen-address", "metrics-address")
        flags = {
            "model": self._layout.model,
            "http-address": "",
            "scheduler-addresses": ",".join(one.scheduler_link.address for one in self.replicas),
            "shutdown-grace": 2,
            **dict(self._layout.router_flags),
            **addresses,
        }
        self.routers.append(await self._start("router", flags, f"router-{index}"))
        self.addresses.append(addresses["listen-address"])

    async def _start(self, module: str, flags: Mapping[str, Any], name: str) -> Member:
        member = Member(module, flags, self._folder / f"{name}.log")
        await member.start()
        self._stack.push_async_callback(member.stop)
        return member

    async def _proxy(self, target: str) -> TcpProxy:
        proxy = TcpProxy(target)
        await proxy.start()
        self._stack.push_async_callback(proxy.close)
        return proxy


class LaunchedCluster(Cluster):
    """One replica under a launcher, which starts and watches its processes itself; with no proxies.

    `program` is the launcher: a module, and its command if it has several. It stands for its router.
    """

    def __init__(self, layout: Layout, program: str) -> None:
        super().__init__(layout)
        self._program = program

    def child(self, name: str) -> psutil.Process | None:
        """The process that runs this module now, if one does."""
        children = psutil.Process(self.routers[0].pid).children()
        with suppress(psutil.NoSuchProcess):
            return next((child for child in children if child.cmdline()[2:3] == [name]), None)
        return None

    async def _start_all(self) -> None:
        metrics = (f"{name}-metrics-address" for name in ("router", "scheduler", "shard"))
        addresses = _free("listen-address", *metrics)
        flags = {
            "model": self._layout.model,
            "http-address": "",
            "device": "cpu",
            "dtype": "float32",
            "kv-cache-memory-bytes": 1 << 26,
            "shutdown-grace": 2,
            **addresses,
        }
        self.routers.append(await self._start(self._program, flags, "launcher"))
        self.addresses.append(addresses["listen-address"])


async def until(condition: Callable[[], bool], problem: str, timeout_s: float = READY_WITHIN_S) -> None:
    """Polls, on a thread, what a process shows only from outside.

    Raises:
        BenchmarkError: it didn't become true in time; with `problem`.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while not await asyncio.to_thread(condition):  # noqa: ASYNC110
                await asyncio.sleep(_POLL_S)
            return
    raise BenchmarkError(f"{problem} after {timeout_s:g} s")


def _free(*options: str) -> dict[str, str]:
    return claim_addresses(dict.fromkeys(options, "127.0.0.1:0"))


__all__: Sequence[str] = ["Cluster", "LaunchedCluster", "Layout", "Member", "Replica", "until"]
