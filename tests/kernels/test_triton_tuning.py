"""The table of tiles, what measures it, and what the compiler makes of its entries."""

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from triton.runtime.errors import OutOfResources

from kernels.triton import tune, tuning
from kernels.triton.attention import attend_prefills
from kernels.triton.decode import attend_decodes
from kernels.triton.tuning import AttentionConfig, Kind
from tests.kernels.cases import DEVICE

SHARED_MEMORY: Final = {"sm80": 163 * 1024, "sm90": 227 * 1024, "other": 64 * 1024}
"""Bytes that a program may take: CUDA C++ Programming Guide, technical specifications."""


def test_every_family_has_every_entry_and_says_where_it_was_measured() -> None:
    table = tuning.read_table()
    assert table["measured_on"].keys() == table["configs"].keys() == {"sm80", "sm90"}
    assert tuple(table["fields"]) == AttentionConfig._fields
    names = {f"{head_dim}/{itemsize}" for head_dim in tuning.HEAD_DIMS for itemsize in tune.CACHE_DTYPES}
    for kinds in table["configs"].values():
        assert tuple(kinds) == tuning.KINDS
        for entries in kinds.values():
            assert entries.keys() == names


@pytest.mark.parametrize("kind", tuning.KINDS)
def test_unknown_gpus_get_small_tiles(kind: Kind) -> None:
    for head_dim in tuning.HEAD_DIMS:
        for itemsize in tune.CACHE_DTYPES:
            config = tuning.lookup("other", kind, head_dim, itemsize)
            # K, V and queries, each once.
            numbers = (2 * config.block_n + config.block_m) * head_dim
            assert numbers * max(itemsize, 2) <= 64 * 1024


def test_a_table_is_written_as_it_is_kept(tmp_path: Path) -> None:
    tuning.write_table(tuning.read_table(), tmp_path / "tuned.json")
    written = (tmp_path / "tuned.json").read_text()
    assert json.loads(written) == tuning.read_table()
    assert '"64/2": [128, 64, 8, 5],\n' in written


def test_the_fastest_that_fits_is_best() -> None:
    configs = [AttentionConfig(16, block_n, 4, 1) for block_n in (16, 32, 64, 128)]

    def measure(config: AttentionConfig) -> float:
        if config.block_n == 128:
            raise OutOfResources(2, 1, "shared memory")
        return abs(config.block_n - 40)

    assert tune.best(configs, measure) == (configs[1], 8)


@pytest.mark.skipif(torch.cuda.is_available(), reason="would measure")
def test_without_a_gpu_nothing_is_measured() -> None:
    with pytest.raises(SystemExit, match="No CUDA GPU here"):
        tune.main([])


@pytest.mark.parametrize("kind", tuning.KINDS)
def test_what_is_measured_can_be_attended(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "LENGTHS", {"prefill": (1, 16, 32), "decode": (2, 1, 32)})
    problem = tune.make_problem(kind, 64, 2, DEVICE)
    attend = attend_prefills if kind == "prefill" else attend_decodes
    attend(problem, AttentionConfig(16, 16, 4, 1))
    first = problem.output.clone()
    attend(problem, AttentionConfig(32, 32, 4, 2))
    torch.testing.assert_close(problem.output, first, atol=2e-2, rtol=0)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What compile_kernels reports."""
    tmp_path = tmp_path_factory.mktemp("triton")
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.kernels.compile_kernels"]
    process = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return [json.loads(line) for line in process.stdout.splitlines()]


def test_kernels_compile_and_fit_without_spills(compiled: list[dict[str, Any]]) -> None:
    assert {report["family"] for report in compiled} == SHARED_MEMORY.keys()
    for report in compiled:
        assert report["shared"] <= SHARED_MEMORY[report["family"]], report
        # What has no entry has to run, if slowly.
        assert report["spilled"] == 0 or report["family"] == "other", report


def test_steps_of_other_sizes_compile_nothing_new(compiled: list[dict[str, Any]]) -> None:
    variants: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for report in compiled:
        if report["launch"] == "steps":
            variants[report["family"], report["kernel"]].add(report["hash"])
    assert len(variants) == 7 * len(SHARED_MEMORY)
    assert {name for name, hashes in variants.items() if len(hashes) > 1} == set()
