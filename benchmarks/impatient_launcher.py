"""`python -m benchmarks.impatient_launcher`, with the flags of `python -m launcher serve`.

It takes a process for hung after `HUNG_AFTER_S`, and not after half a minute.
"""

import sys
from functools import partial
from typing import Final

from launcher import serve
from launcher.__main__ import main
from launcher.supervisor import Supervisor

HUNG_AFTER_S: Final = 4.0


if __name__ == "__main__":
    vars(serve)["Supervisor"] = partial(Supervisor, hung_after_s=HUNG_AFTER_S)
    sys.exit(main(["serve", *sys.argv[1:]]))
