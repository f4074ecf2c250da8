"""Compiles the CPU kernels, once per instruction set, into `build/kernels`: `make kernels`.

The sources need no header of torch and no library. OpenMP's symbols are left open, and resolve to the runtime
that torch brings, so that both share one set of threads.
"""

import argparse
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

SOURCES = Path(__file__).parent
ROOT = SOURCES.parent.parent
OUTPUT = ROOT / "build" / "kernels"
FLAGS = ["-std=c++17", "-O3", "-fopenmp", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"]
# GCC 12 takes its own headers' undefined vectors for mistakes.
FLAGS += ["-Wno-psabi", "-Wno-maybe-uninitialized", "-Wno-uninitialized"]
DIGEST_SIZE = 32
# What compiling takes for a while: a few times the libraries.
ROOM_BYTES = 1 << 24
# From the most to the least able: compiler flags, and what /proc/cpuinfo lists where the code can run.
_V3 = frozenset({"avx2", "fma", "bmi1", "bmi2", "f16c", "movbe"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_WIDE = "-mprefer-vector-width=512"
INSTRUCTION_SETS: dict[str, dict[str, tuple[list[str], frozenset[str]]]] = {
    "x86_64": {
        "avx512bf16": (["-march=x86-64-v4", "-mavx512bf16", _WIDE], _V4 | {"avx512_bf16"}),
        "avx512": (["-march=x86-64-v4", _WIDE], _V4),
        "avx2": (["-march=x86-64-v3"], _V3),
    },
    "aarch64": {"neon": (["-march=armv8-a"], frozenset({"asimd"}))},
}


def library_path(instruction_set: str) -> Path:
    """Where the library for `instruction_set` lies; its name tells its sources, so none is ever stale."""
    flags, _ = INSTRUCTION_SETS[platform.machine()][instruction_set]
    digest = hashlib.sha256(" ".join(FLAGS + flags).encode())
    for source in sorted([*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp")]):
        digest.update(source.read_bytes())
    return OUTPUT / f"{instruction_set}-{digest.hexdigest()[:12]}.so"


def supported_sets(cpu_flags: frozenset[str]) -> list[str]:
    """The instruction sets that a CPU with these flags of /proc/cpuinfo can run, the best first."""
    known = INSTRUCTION_SETS.get(platform.machine(), {})
    return [name for name, (_, needed) in known.items() if needed <= cpu_flags]


def is_intact(path: Path) -> bool:
    """Whether the library's last bytes are the SHA-256 of those before, as `_seal` left them.

    Loading a damaged one could end the process by a signal.

    Raises:
        OSError: it isn't there, or can't be read.
    """
    content = path.read_bytes()
    return content[-DIGEST_SIZE:] == hashlib.sha256(content[:-DIGEST_SIZE]).digest()


def _seal(path: Path) -> None:
    """Appends the digest; what loads a library looks at its beginning."""
    digest = hashlib.sha256(path.read_bytes()).digest()
    with path.open("ab") as file:
        file.write(digest)


def broken_sets() -> list[str]:
    """The instruction sets of this machine's kind whose library is missing or damaged.

    Raises:
        OSError: a library can't be read.
    """
    paths = {name: library_path(name) for name in INSTRUCTION_SETS[platform.machine()]}
    return [name for name, path in paths.items() if not path.exists() or not is_intact(path)]


def compile_sets(compiler: list[str], names: list[str]) -> list[str]:
    """Compiles for these instruction sets, all at once, and removes what older sources left.

    Returns those that failed; the compiler, or the trial of what it made, said why.

    Raises:
        OSError: `OUTPUT` can't be written.
    """
    OUTPUT.mkdir(parents=True, exist_ok=True)
    current = {library_path(name) for name in INSTRUCTION_SETS[platform.machine()]}
    for old in set(OUTPUT.glob("*.so")) - current:
        old.unlink(missing_ok=True)
    with ThreadPoolExecutor() as threads:
        compiled = threads.map(partial(_compile, compiler), names)
        return [name for name, done in zip(names, compiled, strict=True) if not done]


def _compile(compiler: list[str], name: str) -> bool:
    """Whether the library for this instruction set is there now, whole and tried."""
    flags, _ = INSTRUCTION_SETS[platform.machine()][name]
    # Another build may run at the same time, and a process may have the old library mapped.
    with tempfile.TemporaryDirectory(dir=OUTPUT) as folder:
        unit, made = Path(folder) / "decoder.o", Path(folder) / "decoder.so"
        commands = (
            [*compiler, *FLAGS, *flags, "-c", str(SOURCES / "decoder.cpp"), "-o", str(unit)],
            # Linked without -fopenmp, which would bind a second OpenMP runtime.
            [*compiler, "-shared", str(unit), "-o", str(made)],
            [sys.executable, "-m", "kernels.cpu.trial", name, str(made)],
        )
        # What the compiler writes on its way, too, lies where room was asked for.
        environ = {**os.environ, "TMPDIR": folder}
        done = all(subprocess.run(command, cwd=ROOT, env=environ).returncode == 0 for command in commands)  # noqa: S603
        if done:
            _seal(made)
            made.rename(library_path(name))
        return done


def build() -> bool:
    """Builds what is missing or damaged, and prints what it costs if that can't be done.

    Whether nothing is lacking; on a kind of machine that has no kernels, nothing is.
    """
    machine, command = platform.machine(), os.environ.get("CXX") or "g++"
    cost = "models on such a CPU run on plain PyTorch, about ten times slower."
    if machine not in INSTRUCTION_SETS:
        print(f"There are no CPU kernels for {machine}: {cost}")
        return True
    missing = broken_sets()
    if not missing:
        print(f"The CPU kernels are there, in {OUTPUT.relative_to(ROOT)}")
        return True
    compiler = shlex.split(command)
    if not compiler or shutil.which(compiler[0]) is None:
        print(
            f"No {command}, so the CPU kernels are not built: {cost} "
            "Install it (Debian and Ubuntu: apt-get install g++) and run the same command again."
        )
        return False
    OUTPUT.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(OUTPUT).free
    if free < ROOM_BYTES:
        print(
            f"{OUTPUT}: too little room for the CPU kernels: {ROOM_BYTES} bytes needed, {free} free: {cost}"
        )
        return False
    print("Compiling the CPU kernels", flush=True)
    failed = compile_sets(compiler, missing)
    for name in failed:
        print(f"{command} can't compile the CPU kernels for {name}, as it says above: {cost}")
    return not failed


def main() -> int:
    """Returns the exit status: 0 if the libraries are there."""
    parser = argparse.ArgumentParser(
        prog="make kernels",
        description="Compiles the CPU kernels that are missing or damaged into build/kernels.",
        epilog="The environment's CXX names the compiler; by default g++.",
    )
    parser.parse_args()
    try:
        return 0 if build() else 1
    except (OSError, ValueError) as error:
        print(f"The CPU kernels can't be built in {OUTPUT}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Stopped; the same command begins anew.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
