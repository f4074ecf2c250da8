"""`python -m launcher.import_model FILE CACHE`: converts a GGUF file; JSON lines say how far it is."""

import json
import sys
from pathlib import Path

from common.lifecycle import exit_with_parent


def main(source: Path, cache: Path) -> int:
    """Converts `source` into `cache`, or finds it there; the last line names the folder."""
    exit_with_parent()
    from shard.gguf_import import cached_import
    from shard.model_config import ModelError

    def progress(done: int, total: int) -> None:
        print(json.dumps({"done": done, "total": total}), flush=True)

    try:
        folder = cached_import(source, cache, progress)
    except (ModelError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps({"folder": str(folder)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
