"""The lines that the benchmarks against others print and keep: ours, the peer's, the ratio, the limit."""

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any, Final, TextIO

FOLDER: Final = Path(__file__).parent / "results"
ROOT: Final = Path(__file__).parents[1]


def hardware() -> dict[str, Any]:
    """Of this machine; memory in GiB."""
    cpu = next(
        (line.partition(":")[2].strip() for line in _read("/proc/cpuinfo") if line.startswith("model name")),
        platform.machine(),
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    found = {"cpu": cpu, "cores": os.cpu_count(), "memory_gib": round(memory, 1)}
    return found | ({"gpu": gpu} if (gpu := _gpu()) else {})


def _read(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _gpu() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def commit() -> str:
    """The tree's commit, with `+` where files were changed; empty outside of git."""
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)  # noqa: S603
    return found.stdout.strip()


def comparison(
    name: str,
    unit: str,
    ours: Sequence[float],
    peer: Sequence[float] = (),
    against: str | None = None,
    limit: float | None = None,
    lower_is_better: bool = False,
) -> dict[str, Any]:
    """One line. Figures are medians of the runs; a ratio above 1 says that ours is better.

    Where both ran as often, it is the median of the rounds' ratios: a machine's speed changes between rounds.
    `limit` is in the same unit, and `limit_fraction` 1 where ours reaches it.
    """
    mine = median(ours)
    theirs = median(peer) if peer else None
    rounds = zip(ours, peer, strict=True) if len(ours) == len(peer) else [(mine, theirs)]
    ratios = [_ratio(theirs, mine) if lower_is_better else _ratio(mine, theirs) for mine, theirs in rounds]
    known = [ratio for ratio in ratios if ratio is not None]
    nearer, farther = (limit, mine) if lower_is_better else (mine, limit)
    return {
        "name": name,
        "unit": unit,
        "ours": _round(mine),
        "peer": _round(theirs),
        "against": against,
        "ratio": round(median(known), 3) if known else None,
        "limit_fraction": _ratio(nearer, farther),
        "ours_runs": [_round(value) for value in ours],
        "peer_runs": [_round(value) for value in peer],
    }


def _round(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def _ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or not below else round(above / below, 3)


class Results:
    """Prints JSON lines and, with a folder, keeps them in `NAME-DATE.jsonl`, behind one of circumstances."""

    def __init__(self, name: str, folder: Path | None, flags: dict[str, Any]) -> None:
        from kernels import cpu_kernels

        self.cpu_kernels = cpu_kernels()
        """The instruction set of the kernels that a CPU runs here; None where none are built."""
        self._name = name
        self._file: TextIO | None = None
        if folder:
            today = datetime.now(UTC).date().isoformat()
            folder.mkdir(parents=True, exist_ok=True)
            # A run that fails leaves the results of an earlier one alone.
            self._path = folder / f"{name}-{today}.jsonl"
            versions = {one: metadata.version(one) for one in ("torch", "grpcio")}
            head: dict[str, Any] = {
                "benchmark": name,
                "date": today,
                "commit": commit(),
                "hardware": hardware(),
            }
            head |= {"python": platform.python_version(), **versions}
            head["cpu_kernels"] = self.cpu_kernels
            head |= {
                "flags": {key: value for key, value in flags.items() if value is not None and key != "output"}
            }
            self._partial = self._path.with_suffix(".partial")
            self._file = self._partial.open("w")
            print(json.dumps(head, default=str), file=self._file, flush=True)

    def line(self, fields: dict[str, Any]) -> None:
        """One JSON object."""
        text = json.dumps({"benchmark": self._name, **fields}, ensure_ascii=False)
        print(text, flush=True)
        if self._file:
            print(text, file=self._file, flush=True)

    def close(self, complete: bool) -> None:
        """With `complete`, the file gets its name; otherwise it goes."""
        if self._file:
            self._file.close()
            if complete:
                self._partial.replace(self._path)
            else:
                self._partial.unlink()
