"""Imported before gRPC, which then reads how much to print: nothing, unless `GRPC_VERBOSITY` says otherwise.

What it has to say reaches us as errors; on standard error it would stand between our lines, which may be
JSON, and a handshake that fails many times a second would fill a disk.
"""

import os

os.environ.setdefault("GRPC_VERBOSITY", "NONE")
