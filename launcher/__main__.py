"""`python -m launcher COMMAND`: the command-line face of a Pagoda on this machine."""

import os
import sys

from common import quiet_libraries  # noqa: F401
from launcher import preflight

COMMANDS = ("serve", "chat", "ranks")
USAGE = """usage: python -m launcher COMMAND [OPTION...]

commands:
  serve   serve a model on this machine (router, scheduler and shard)
  chat    chat with a running server in this terminal
  ranks   run the shard processes of this machine, in a container

`python -m launcher COMMAND --help` lists the options of each."""


def main(arguments: list[str]) -> int:
    """Runs one command; returns the exit status."""
    command, *rest = arguments or ["--help"]
    if command in ("-h", "--help"):
        print(USAGE)
        return 0
    if command not in COMMANDS:
        there_are = ", ".join(COMMANDS)
        print(f"python -m launcher: {command!r} is no command; there are: {there_are}", file=sys.stderr)
        return 2
    _open_standard_streams()
    # Pipes and log collectors should see each line, and a streamed word, when it is there.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    try:
        if command == "ranks":
            from launcher import ranks

            return ranks.main(rest)
        preflight.check_installation(command)
        if command == "serve":
            from launcher import serve

            return serve.main(rest)
        from launcher import chat

        return chat.main(rest)
    except preflight.PreflightError as error:
        print(f"python -m launcher {command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 1
    finally:
        try:
            sys.stdout.flush()
        except OSError:
            # Whoever read the output has gone; Python must not try to flush into it again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _open_standard_streams() -> None:
    """Makes closed ones the null device; else a socket would get their numbers, and what is printed."""
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)
            os.set_inheritable(descriptor, True)
            setattr(sys, name, open(descriptor, mode, encoding="utf-8"))  # noqa: SIM115


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
