"""Runs in a peer's environment: `python -P child.py SCRIPT OPTIONS`. Standard library and SCRIPT.py alone.

OPTIONS is a JSON object. SCRIPT.py beside this file defines `load(options)`, which returns a function from
`{"requests": [{"prompt", "max_tokens", "arrival_s"}], "stream"}` to `{"seconds", "tokens", "answers"}`, with
one `[ttft_s, end_s]` per request in `answers`, or none where nothing was timed. One JSON line is written when
it is loaded, and one for each line that comes; at the end, its `close()` is called if it has one. What
libraries print goes to standard error.
"""

import importlib.util
import json
import os
import sys
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


def main(script: str, options: str) -> None:
    """Until standard input ends."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)

        def answer(fields: dict[str, Any]) -> None:
            print(json.dumps(fields), file=answers, flush=True)

        module = load_script(script)
        run = module.load(json.loads(options))
        answer({"loaded": script})
        for line in sys.stdin:
            answer(run(json.loads(line)))
        if hasattr(module, "close"):
            module.close()
    # Past the threads of engines that don't end by themselves.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
