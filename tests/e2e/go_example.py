"""The example for Go, built with the libraries that Debian packages instead of those that its go.mod names.

Debian lays them out for GOPATH, in which go reads no go.mod and fetches nothing.
"""

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# What gRPC 1.33 has under other names: two files to lie among its own.
SHIMS = Path(__file__).parent / "go_shims"
GRPC = "src/google.golang.org/grpc"
DEBIAN = Path("/usr/share/gocode")
SCRATCH = ROOT / "build/go"
# Where a module of this name lies; the protos are two folders up, as in the tree.
FOLDER = SCRATCH / "src/example.com/stream"
TOOLS = ("go", "protoc", "protoc-gen-go", "protoc-gen-go-grpc")
LIBRARIES = (GRPC, "src/google.golang.org/genproto", "src/github.com/golang/protobuf")


def go(*arguments: str) -> subprocess.CompletedProcess[str]:
    """What the command gives in the copy of the example."""
    offline = {"GO111MODULE": "off", "GOFLAGS": "", "GOPATH": f"{SCRATCH}:{DEBIAN}", "CGO_ENABLED": "0"}
    return subprocess.run(
        arguments, cwd=FOLDER, env={**os.environ, **offline}, capture_output=True, text=True, timeout=240
    )


@cache
def go_example() -> tuple[str, ...]:
    """Its command line. Without Debian's packages the test is skipped, or fails in CI."""
    missing = [name for name in TOOLS if shutil.which(name) is None]
    missing += [name for name in LIBRARIES if not (DEBIAN / name).exists()]
    if missing:
        (pytest.fail if "CI" in os.environ else pytest.skip)(
            f"needs {', '.join(missing)}, of the Debian packages that .ci/run names"
        )
    shutil.rmtree(SCRATCH, ignore_errors=True)
    shutil.copytree(ROOT / "protos", SCRATCH / "src/protos")
    shutil.copytree(ROOT / "examples/go", FOLDER)
    if not (DEBIAN / GRPC / "credentials/insecure").exists():
        shutil.copytree(DEBIAN / GRPC, SCRATCH / GRPC)
        shutil.copytree(SHIMS, SCRATCH / GRPC, dirs_exist_ok=True)
    for command in (("./generate.sh",), ("go", "build")):
        result = go(*command)
        assert result.returncode == 0, result.stderr
    # Newer gRPC retries without being told to.
    return ("env", "GRPC_GO_RETRY=on", str(FOLDER / "stream"))
