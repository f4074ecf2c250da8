"""Imported before gRPC and torch, which then read how much to print: nothing that isn't asked for.

What they have to say reaches us as errors. On standard error it would stand between our lines, which may be
JSON, and a handshake that fails many times a second would fill a disk.
"""

import os

os.environ.setdefault("GRPC_VERBOSITY", "NONE")
# Rendezvous and sockets warn at length, with C++ frames.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
