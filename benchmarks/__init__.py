"""What is measured, and against whom: `python -m benchmarks.NAME`."""

import signal
import sys

# Imports take seconds; until the benchmark itself minds it, Ctrl-C ends the process without a traceback.
# Python puts "-m" there while it looks for the module to run.
if sys.argv[0] == "-m":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
