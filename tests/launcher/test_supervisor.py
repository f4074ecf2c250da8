"""Children are restarted within reason, and never outlive the launcher."""

import asyncio
import dataclasses
import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

import psutil
import pytest

from common.probes import serve_probes
from launcher.children import ChildSpec
from launcher.preflight import ROOT
from launcher.supervisor import MAX_RESTARTS, WINDOW_S, RestartBudget, StopSignals, Supervisor
from tests.launcher.fakes import Failing, child, event_pipe, polite, stubborn

Events = tuple[Path, IO[str]]


@pytest.fixture
def events(tmp_path: Path) -> Iterator[Events]:
    with event_pipe(tmp_path) as pipe:
        yield pipe


@pytest.fixture
async def stop() -> StopSignals:
    return StopSignals()


async def read(events: Events, count: int) -> list[str]:
    return [(await asyncio.to_thread(events[1].readline)).strip() for _ in range(count)]


def running(lines: list[str], stop: StopSignals, *specs: ChildSpec) -> tuple[Supervisor, asyncio.Task[int]]:
    supervisor = Supervisor(specs, stop, lines.append, first_delay_s=0.001)
    return supervisor, asyncio.create_task(supervisor.run())


def test_pauses_double_and_old_restarts_are_forgiven() -> None:
    budget = RestartBudget(first_delay_s=0.5)

    assert [budget.next_delay(now=0.0) for _ in range(6)] == [0.5, 1, 2, 4, 8, None]
    assert budget.next_delay(now=WINDOW_S + 1) == 0.5


async def test_a_child_that_keeps_dying_is_given_up_after_five_restarts(
    events: Events, stop: StopSignals
) -> None:
    lines: list[str] = []
    dying = child("shard", "tell('started'); sys.exit(3)", events[0])
    _, run = running(lines, stop, polite("router", events[0]), dying)

    assert await run == 1
    assert [line.split(" in ")[0] for line in lines[:MAX_RESTARTS]] == [
        f"shard ended (exit status 3); restart {n} of 5" for n in range(1, 6)
    ]
    assert lines[MAX_RESTARTS:] == [
        "shard ended (exit status 3), 5 restarts in five minutes did not help; stopping"
    ]


@pytest.mark.parametrize("status", [2, 3])
async def test_the_others_go_on_without_what_is_not_essential(
    status: int, events: Events, stop: StopSignals
) -> None:
    lines: asyncio.Queue[str] = asyncio.Queue()
    dying = dataclasses.replace(child("prometheus", f"sys.exit({status})", events[0]), essential=False)
    specs = [polite("router", events[0]), dying]
    run = asyncio.create_task(Supervisor(specs, stop, lines.put_nowait, first_delay_s=0.001).run())

    said = [await lines.get() for _ in range(MAX_RESTARTS + 1)]

    assert said[-1].endswith("restarts in five minutes did not help; going on without it")
    assert await read(events, 1) == ["started router"]
    stop.first.set()
    assert await read(events, 1) == ["stopped router"]
    assert await run == 0


async def test_children_leave_threads_to_ask_for_their_probes(events: Events, stop: StopSignals) -> None:
    threads = 2
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(threads))
    specs = [polite(f"shard-{rank}", events[0]) for rank in range(threads)]
    _, run = running([], stop, *specs)

    try:
        async with asyncio.timeout(20):
            started = await read(events, len(specs))
    finally:
        stop.first.set()

    assert len(started) == len(specs)
    assert await run == 0


async def test_a_killed_child_is_restarted_and_its_signal_named(events: Events, stop: StopSignals) -> None:
    lines: list[str] = []
    _, run = running(lines, stop, child("shard", "tell(str(os.getpid())); signal.pause()", events[0]))
    [first] = await read(events, 1)

    os.kill(int(first), signal.SIGKILL)
    [second] = await read(events, 1)
    stop.first.set()

    assert await run == 0
    assert first != second
    assert lines == ["shard ended (killed by SIGKILL); restart 1 of 5 in 0.001 s"]


async def test_a_hung_child_is_killed_and_restarted(events: Events, stop: StopSignals) -> None:
    lines: list[str] = []
    address = f"127.0.0.1:{serve_probes('127.0.0.1:0', Failing())}"
    hangs = dataclasses.replace(stubborn("shard", events[0]), metrics_address=address)
    supervisor = Supervisor([hangs], stop, lines.append, first_delay_s=0.001, hung_after_s=0.5)
    run = asyncio.create_task(supervisor.run())

    assert await read(events, 2) == ["started shard"] * 2
    stop.first.set()
    stop.second.set()

    assert await run == 0
    assert lines == [
        "shard has not been alive for 0.5 s; killing it",
        "shard ended (killed by SIGKILL); restart 1 of 5 in 0.001 s",
    ]


async def test_a_configuration_error_at_start_is_not_retried(events: Events, stop: StopSignals) -> None:
    lines: list[str] = []
    wrong = child("scheduler", "sys.exit(2)", events[0])
    _, run = running(lines, stop, polite("router", events[0]), wrong)

    assert await run == 2
    assert lines == ["scheduler refused its configuration (exit status 2; its reason is above); stopping"]


async def test_what_says_that_it_stops_stops_already(events: Events, stop: StopSignals) -> None:
    said: list[tuple[str, bool]] = []
    wrong = child("scheduler", "sys.exit(2)", events[0])
    supervisor = Supervisor([wrong], stop, lambda line: said.append((line, supervisor.stopping)))

    await supervisor.run()

    [(line, stopping)] = said
    assert line.endswith("stopping")
    assert stopping


async def test_status_2_is_an_ordinary_death_once_all_were_ready(events: Events, stop: StopSignals) -> None:
    lines: list[str] = []
    supervisor, run = running(lines, stop, child("scheduler", "sys.exit(2)", events[0]))
    supervisor.starting = False

    assert await run == 1
    assert len(lines) == MAX_RESTARTS + 1


async def test_children_stop_in_order_each_after_the_one_before(events: Events, stop: StopSignals) -> None:
    names = ["router", "scheduler", "shard"]
    _, run = running([], stop, *(polite(name, events[0]) for name in names))
    assert sorted(await read(events, 3)) == [f"started {name}" for name in names]

    stop.first.set()

    assert await run == 0
    assert await read(events, 3) == [f"stopped {name}" for name in names]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_each_signal_that_asks_for_an_end_lets_children_end(
    number: signal.Signals, events: Events, stop: StopSignals
) -> None:
    _, run = running([], stop, polite("router", events[0]))
    await read(events, 1)

    os.kill(os.getpid(), number)

    assert await run == 0
    assert await read(events, 1) == ["stopped router"]


async def test_an_ignored_hangup_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        StopSignals()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


async def test_a_child_that_does_not_stop_in_time_is_killed(events: Events, stop: StopSignals) -> None:
    lines: list[str] = []
    _, run = running(lines, stop, stubborn("router", events[0], stop_within_s=0.1))
    await read(events, 1)

    stop.first.set()

    assert await run == 0
    assert lines == ["router did not stop within 0.1 s; killing it"]


async def test_a_second_signal_kills_at_once(events: Events, stop: StopSignals) -> None:
    _, run = running([], stop, stubborn("router", events[0]), stubborn("shard", events[0]))
    await read(events, 2)

    os.kill(os.getpid(), signal.SIGINT)
    await stop.first.wait()
    os.kill(os.getpid(), signal.SIGINT)

    assert await asyncio.wait_for(run, timeout=10) == 0


LAUNCHER = """
import asyncio, os, sys
from launcher.children import ChildSpec
from launcher.supervisor import StopSignals, Supervisor

CHILD = '''
import os, signal, sys
from common.lifecycle import exit_with_parent
exit_with_parent()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
with open(sys.argv[1], "w") as pipe:
    pipe.write(f"{os.getpid()}\\\\n")
while True:
    signal.pause()
'''

async def main():
    argv = (sys.executable, "-c", CHILD, sys.argv[1])
    names = ("router", "scheduler", "shard")
    specs = [ChildSpec(name, "127.0.0.1:1", argv, os.environ, 30) for name in names]
    await Supervisor(specs, StopSignals(), print).run()

asyncio.run(main())
"""


async def test_a_killed_launcher_leaves_no_process(events: Events) -> None:
    launcher = await asyncio.create_subprocess_exec(sys.executable, "-c", LAUNCHER, events[0], cwd=ROOT)
    children = [psutil.Process(int(pid)) for pid in await read(events, 3)]

    launcher.kill()
    await launcher.wait()

    _, alive = psutil.wait_procs(children, timeout=10)
    assert alive == []
