"""Compiles the CPU kernels, once per instruction set, into `build/kernels`: `python -m kernels.cpu`.

The sources need no header of torch and no library. OpenMP's symbols are left open, and resolve to the runtime
that torch brings, so that both share one set of threads.
"""

import hashlib
import platform
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parent
OUTPUT = SOURCES.parent.parent / "build" / "kernels"
FLAGS = ["-std=c++17", "-O3", "-fopenmp", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"]
# GCC 12 takes its own headers' undefined vectors for mistakes.
FLAGS += ["-Wno-psabi", "-Wno-maybe-uninitialized", "-Wno-uninitialized"]
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


def compile_all(compiler: str) -> list[str]:
    """Compiles what is missing, all at once, and removes what older sources left.

    Returns the instruction sets that the compiler failed for; it said why.
    """
    OUTPUT.mkdir(parents=True, exist_ok=True)
    known = INSTRUCTION_SETS[platform.machine()]
    paths = {name: library_path(name) for name in known}
    for old in set(OUTPUT.glob("*.so")) - {*paths.values()}:
        old.unlink()
    missing = [name for name, path in paths.items() if not path.exists()]
    with ThreadPoolExecutor() as threads:
        compiled = threads.map(lambda name: _compile(compiler, paths[name], known[name][0]), missing)
        return [name for name, done in zip(missing, compiled, strict=True) if not done]


def _compile(compiler: str, path: Path, flags: list[str]) -> bool:
    unit, part = path.with_suffix(".o"), path.with_suffix(".part")
    commands = (
        [compiler, *FLAGS, *flags, "-c", str(SOURCES / "decoder.cpp"), "-o", str(unit)],
        # Linked without -fopenmp, which would bind a second OpenMP runtime.
        [compiler, "-shared", str(unit), "-o", str(part)],
    )
    done = all(subprocess.run(command).returncode == 0 for command in commands)  # noqa: S603
    if done:
        part.rename(path)
    unit.unlink(missing_ok=True)
    return done


def main() -> None:
    """Builds if there is a compiler; where it can't, says what that costs, which is no error."""
    machine, compiler = platform.machine(), shutil.which("g++")
    cost = "models on such a CPU run on plain PyTorch, several times slower."
    if machine not in INSTRUCTION_SETS:
        print(f"There are no CPU kernels for {machine}: {cost}")
    elif compiler is None:
        print(
            f"No g++, so the CPU kernels are not built: {cost} "
            "Install it (Debian and Ubuntu: apt-get install g++) and run the same command again."
        )
    else:
        print("Compiling the CPU kernels", flush=True)
        for name in compile_all(compiler):
            print(f"{compiler} can't compile the CPU kernels for {name}, as it says above: {cost}")
