"""`python -m launcher COMMAND`: the command-line face of a Pagoda on this machine."""

import os
import sys

from launcher import preflight

USAGE = """usage: python -m launcher COMMAND [OPTION...]

commands:
  serve   serve a model on this machine (router, scheduler and shard)
  chat    chat with a running server in this terminal

`python -m launcher COMMAND --help` lists the options of each."""


def main(arguments: list[str]) -> int:
    """Runs one command; returns the exit status."""
    command, *rest = arguments or ["--help"]
    if command in ("-h", "--help"):
        print(USAGE)
        return 0
    if command not in ("serve", "chat"):
        print(f"python -m launcher: {command!r} is no command; there are: serve, chat", file=sys.stderr)
        return 2
    # Pipes and log collectors should see each line, and a streamed word, when it is there.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    try:
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
        # Whoever read the output has gone; Python must not try to flush into it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
