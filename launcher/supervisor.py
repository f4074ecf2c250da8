"""Keeps the child processes running, and ends them in order."""

import asyncio
import os
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from common.lifecycle import stop_signals
from launcher.children import ChildSpec
from launcher.liveness import HUNG_AFTER_S, wait_until_hung
from launcher.preflight import ROOT

MAX_RESTARTS = 5
WINDOW_S = 300.0
FIRST_DELAY_S = 0.5
# What processes here exit with when their configuration is wrong.
CONFIGURATION_ERROR = 2
# With a process given up, running requests can't end; nobody need wait for them.
STOP_AFTER_FAILURE_S = 5.0


class StopSignals:
    """`stop_signals` of the loop: the first asks for an orderly end, the second ends all at once."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        for number in stop_signals():
            asyncio.get_running_loop().add_signal_handler(number, self._count)

    def _count(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


class RestartBudget:
    """How often, and after what pause, one child may be started again: five times in five minutes."""

    def __init__(self, first_delay_s: float = FIRST_DELAY_S) -> None:
        self._first_delay_s = first_delay_s
        self._restarts: deque[float] = deque()

    @property
    def used(self) -> int:
        """Restarts within the window, as of the last call of `next_delay`."""
        return len(self._restarts)

    def next_delay(self, now: float) -> float | None:
        """Seconds to wait before a restart, doubled with each recent one; None once there were too many."""
        while self._restarts and now - self._restarts[0] > WINDOW_S:
            self._restarts.popleft()
        if len(self._restarts) == MAX_RESTARTS:
            return None
        self._restarts.append(now)
        return float(self._first_delay_s * 2 ** (len(self._restarts) - 1))


class Child:
    """One process at a time that runs `spec`, in its own session.

    Its standard input is a pipe that only this process holds the other end of: whatever ends this process,
    the pipe closes and the child exits.
    """

    def __init__(self, spec: ChildSpec) -> None:
        self.spec = spec
        self._process: subprocess.Popen[bytes] | None = None
        # Of its own: on few cores, waits for many children would take all threads that probes are asked from.
        self._waiting = ThreadPoolExecutor(1, thread_name_prefix=spec.name)

    def start(self) -> None:
        """Starts the process."""
        self._process = subprocess.Popen(
            self.spec.argv, stdin=subprocess.PIPE, env=self.spec.environ, cwd=ROOT, start_new_session=True
        )

    async def wait(self) -> int:
        """Waits until the process ends; its exit status, or minus the signal that killed it."""
        if self._process is None:
            return 0
        status = await asyncio.get_running_loop().run_in_executor(self._waiting, self._process.wait)
        if self._process.stdin is not None:
            self._process.stdin.close()
        return status

    def terminate(self) -> None:
        """Asks the process to end."""
        if self._process is not None:
            self._process.terminate()

    def kill(self) -> None:
        """Ends the process, and what it started, at once."""
        if self._process is not None and self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


class Supervisor:
    """Runs every child until it is told to stop, or until an essential one can't be kept running.

    One that has started and hasn't been alive for `hung_after_s` is killed, and so started again. `specs` are
    in the order of stopping. `say` gets one line for each thing that a person should know.
    """

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        stop: StopSignals,
        say: Callable[[str], None],
        first_delay_s: float = FIRST_DELAY_S,
        hung_after_s: float = HUNG_AFTER_S,
    ) -> None:
        self.starting = True
        """Whether a configuration error is to be expected still; cleared by the owner once all are ready."""
        self._children = [Child(spec) for spec in specs]
        self._stop = stop
        self._say = say
        self._first_delay_s = first_delay_s
        self._hung_after_s = hung_after_s
        self._stopping = asyncio.Event()

    @property
    def stopping(self) -> bool:
        """Whether children are about to end, as was asked for or because one can't be kept running."""
        return self._stop.first.is_set() or self._stopping.is_set()

    async def run(self) -> int:
        """Starts all children; returns the launcher's exit status when all have ended."""
        stop = asyncio.create_task(self._stop.first.wait())
        keepers = [asyncio.create_task(self._keep_running(child)) for child in self._children]
        try:
            await asyncio.wait([stop, *keepers], return_when=asyncio.FIRST_COMPLETED)
            failures = [keeper.result() for keeper in keepers if keeper.done()]
            await self._stop_all(STOP_AFTER_FAILURE_S if failures else float("inf"))
            await asyncio.gather(*keepers)
        finally:
            stop.cancel()
            for child in self._children:
                child.kill()
        return max(failures, default=0)

    async def _keep_running(self, child: Child) -> int:
        """Returns when all are stopping, or the exit status that this child's failure means."""
        budget = RestartBudget(self._first_delay_s)
        while not self._stopping.is_set():
            child.start()
            watching = asyncio.create_task(self._kill_if_hung(child))
            status = await child.wait()
            watching.cancel()
            if self._stopping.is_set():
                break
            name, ended = child.spec.name, describe_end(status)
            essential = child.spec.essential
            if status == CONFIGURATION_ERROR and self.starting and essential:
                self._stopping.set()
                self._say(f"{name} refused its configuration ({ended}; its reason is above); stopping")
                return CONFIGURATION_ERROR
            delay = budget.next_delay(asyncio.get_running_loop().time())
            if delay is None:
                outcome = "stopping" if essential else "going on without it"
                if essential:
                    self._stopping.set()
                self._say(
                    f"{name} ended ({ended}), {MAX_RESTARTS} restarts in five minutes did not help; {outcome}"
                )
                await self._stopping.wait()
                return int(essential)
            self._say(f"{name} ended ({ended}); restart {budget.used} of {MAX_RESTARTS} in {delay:g} s")
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay)
        return 0

    async def _kill_if_hung(self, child: Child) -> None:
        if not child.spec.essential:
            return
        await wait_until_hung(child.spec.metrics_address, self._hung_after_s)
        self._say(f"{child.spec.name} has not been alive for {self._hung_after_s:g} s; killing it")
        child.kill()

    async def _stop_all(self, limit_s: float) -> None:
        self._stopping.set()
        at_once = asyncio.create_task(self._stop.second.wait())
        for child in self._children:
            child.terminate()
            ended = asyncio.create_task(child.wait())
            limit = min(limit_s, child.spec.stop_within_s)
            await asyncio.wait([ended, at_once], timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done() and not at_once.done():
                self._say(f"{child.spec.name} did not stop within {limit:g} s; killing it")
            child.kill()
            await ended
        at_once.cancel()


def describe_end(status: int) -> str:
    """How a process ended, from its `returncode`."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"
