"""How a process ends: by signal, in order, or with the launcher that started it."""

import asyncio
import gc
import os
import signal
import sys
import threading


def exit_with_parent() -> None:
    """Ends this process as soon as standard input closes.

    The launcher holds the other end and never writes. The kernel closes it however the launcher ends, so
    that no child outlives it; there is nobody left to drain for.
    """

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        os._exit(0)

    threading.Thread(target=watch, name="exit-with-parent", daemon=True).start()


def calm_garbage_collector(young: int = 100_000, middle: int = 50, old: int = 100) -> None:
    """For a process that makes many small objects per step: collect seldom, and never what is there now.

    Left alone, Python's collector would look through everything alive several times a second. The thresholds
    are those of `gc.set_threshold`, for a process that hardly makes a cycle: what is in one stays till then.
    """
    gc.freeze()
    gc.set_threshold(young, middle, old)


def stop_signals() -> list[signal.Signals]:
    """The signals that ask for an orderly end: SIGTERM, SIGINT and SIGHUP.

    A terminal that closes sends SIGHUP. Where it was ignored from the start, as `nohup` does, it still is.
    """
    hangup = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGTERM, signal.SIGINT, *hangup]


def stop_event() -> asyncio.Event:
    """An event of the running loop that each of `stop_signals` sets."""
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in stop_signals():
        loop.add_signal_handler(number, event.set)
    return event
