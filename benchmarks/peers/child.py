"""Runs in a peer's environment: `python -P child.py SCRIPT OPTIONS`. Standard library and SCRIPT.py alone.

OPTIONS is a JSON object. SCRIPT.py beside this file defines `load(options)`, which returns a function from
`{"requests": [{"prompt", "max_tokens", "arrival_s"}], "stream"}` to `{"seconds", "tokens", "answers"}`, with
one `[ttft_s, end_s]` per request in `answers`, or none where nothing was timed. One JSON line is written when
it is loaded, and one for each line that comes; at the end, its `close()` is called if it has one. If the end
comes while it is busy, whoever asked was killed, and this ends with all that it started. What libraries print
goes to standard error.
"""

import importlib.util
import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def load_script(name: str) -> Any:
    """The module beside this file, which no import path leads to."""
    path = Path(__file__).parent / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"peer_{name}", path)
    assert spec  # noqa: S101
    assert spec.loader  # noqa: S101
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Lines:
    """Of standard input, read by a thread, so that its end is seen at once."""

    def __init__(self) -> None:
        self.idle = threading.Event()
        """Whether nothing is asked; cleared by each line."""
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        # Apart from sys.stdin, which a forked process may close while this thread holds its lock.
        self._file = os.fdopen(os.dup(0))
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._file:
            self.idle.clear()
            self._lines.put(line)
        if not self.idle.is_set():
            os.killpg(0, signal.SIGKILL)
        self._lines.put(None)

    def __iter__(self) -> Iterator[str]:
        while (line := self._lines.get()) is not None:
            yield line


def main(script: str, options: str) -> None:
    """Until standard input ends."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)

        lines = Lines()

        def answer(fields: dict[str, Any]) -> None:
            lines.idle.set()
            print(json.dumps(fields), file=answers, flush=True)

        module = load_script(script)
        run = module.load(json.loads(options))
        answer({"loaded": script})
        for line in lines:
            answer(run(json.loads(line)))
        if hasattr(module, "close"):
            module.close()
    # Past the threads of engines that don't end by themselves.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
