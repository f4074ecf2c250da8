"""`python -m kernels.cpu.trial SET LIBRARY`: loads a library just built and, where this CPU can, runs it.

In a process of its own, which a bad one may end.
"""

import sys
from pathlib import Path

import torch

from kernels.cpu.build import supported_sets
from kernels.cpu.decoder import PackedLinear
from kernels.cpu.library import bind, cpu_flags


def main(instruction_set: str, path: Path) -> str | None:
    """What is wrong with the library, if anything is."""
    try:
        library = bind(path)
    except (OSError, AttributeError) as error:
        return f"{instruction_set}: what was built can't be loaded: {error}"
    if instruction_set in supported_sets(cpu_flags()):
        x, weight = torch.ones(3, 64), torch.ones(40, 64)
        if not PackedLinear(library, weight, torch.float32).forward(x).eq(64).all():
            return f"{instruction_set}: what was built multiplies wrongly"
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
