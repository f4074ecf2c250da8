"""Measures the attention kernels' tiles on this machine's GPU: `python -m kernels.triton.tune [--write]`.

Prints one JSON object per head size and bytes of a cached number, with the best tiles and their time.
`--write` puts them into `tuned.json` and names the GPU there. Run it on an idle GPU of a family that the
table has; it takes long, most of it compiling.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from typing import Final

import torch
import triton
from triton.runtime.errors import OutOfResources

from kernels.batch import AttentionBatch
from kernels.triton import tuning
from kernels.triton.attention import attend_prefills
from kernels.triton.decode import attend_decodes
from kernels.triton.problem import AttentionProblem
from kernels.triton.tuning import AttentionConfig, Kind

# 8 KV heads with 4 query heads each, as in Llama 3.1 8B; lengths in tokens.
NUM_KV_HEADS: Final = 8
GROUP: Final = 4
BLOCK_SIZE: Final = 16
LENGTHS: Final[dict[Kind, tuple[int, int, int]]] = {"prefill": (2, 2048, 4096), "decode": (64, 1, 2048)}
"""How many sequences, and of each the tokens in the step and in the cache."""
CACHE_DTYPES: Final = {1: torch.float8_e4m3fn, 2: torch.bfloat16, 4: torch.float32}
"""By itemsize. Queries are bfloat16 unless the caches are float32."""


def main(arguments: list[str]) -> None:
    """Exits with a message where there is no GPU to measure."""
    parser = argparse.ArgumentParser(prog="python -m kernels.triton.tune", description=__doc__)
    parser.add_argument(
        "--write", action="store_true", help="replace this GPU family's entries in tuned.json"
    )
    write = parser.parse_args(arguments).write
    if not torch.cuda.is_available():
        sys.exit("No CUDA GPU here: tiles can only be measured on one.")
    family, gpu = tuning.current_family(), torch.cuda.get_device_name()
    table = tuning.read_table()
    if write and family not in table["configs"]:
        sys.exit(
            f"{gpu} belongs to none of the table's families {sorted(table['configs'])}: leave --write out."
        )
    for kind, head_dim, itemsize in product(tuning.KINDS, tuning.HEAD_DIMS, CACHE_DTYPES):
        problem = make_problem(kind, head_dim, itemsize)
        attend = attend_prefills if kind == "prefill" else attend_decodes
        config, milliseconds = best(candidates(kind), lambda config: measure(attend, problem, config))  # noqa: B023
        found = {"gpu": gpu, "kind": kind, "head_dim": head_dim, "itemsize": itemsize, **config._asdict()}
        print(json.dumps({**found, "milliseconds": milliseconds}), flush=True)
        if write:
            table["configs"][family][kind][f"{head_dim}/{itemsize}"] = list(config)
    if write:
        table["measured_on"][family] = gpu
        tuning.write_table(table)


def candidates(kind: Kind) -> Iterator[AttentionConfig]:
    """Every combination worth a try; those that a GPU can't hold fail when tried.

    K and V wait for the block table, so it takes two stages to have one more tile of them on its way.
    """
    block_ms = (16, 32, 64, 128) if kind == "prefill" else (16,)
    yield from map(
        AttentionConfig, *zip(*product(block_ms, (16, 32, 64, 128), (4, 8), (1, 2, 3, 5, 7)), strict=True)
    )


def best(
    configs: Iterable[AttentionConfig], time: Callable[[AttentionConfig], float]
) -> tuple[AttentionConfig, float]:
    """The fastest and its time. Raises `ValueError` if none fits the GPU."""
    times: dict[AttentionConfig, float] = {}
    for config in configs:
        try:
            times[config] = time(config)
        except OutOfResources:
            continue
    fastest = min(times, key=lambda config: times[config])
    return fastest, times[fastest]


def measure(
    attend: Callable[[AttentionProblem, AttentionConfig], None],
    problem: AttentionProblem,
    config: AttentionConfig,
) -> float:
    """Median milliseconds."""
    milliseconds: float = triton.testing.do_bench(lambda: attend(problem, config), return_mode="median")
    return milliseconds


def make_problem(kind: Kind, head_dim: int, itemsize: int, device: str = "cuda") -> AttentionProblem:
    """Random sequences of `LENGTHS` in shuffled blocks."""
    num_seqs, query_len, seq_len = LENGTHS[kind]
    dtype = torch.float32 if itemsize == 4 else torch.bfloat16
    blocks = seq_len // BLOCK_SIZE
    shape = (num_seqs * blocks, BLOCK_SIZE, NUM_KV_HEADS, head_dim)
    caches = [torch.randn(shape, dtype=dtype, device=device).to(CACHE_DTYPES[itemsize]) for _ in "kv"]
    tables = torch.randperm(num_seqs * blocks, device=device).view(num_seqs, blocks).int()
    batch = AttentionBatch.build(tables, [query_len] * num_seqs, [seq_len] * num_seqs, BLOCK_SIZE)
    query = torch.randn(num_seqs * query_len, NUM_KV_HEADS * GROUP, head_dim, dtype=dtype, device=device)
    return AttentionProblem.of(query, caches[0], caches[1], batch, head_dim**-0.5, 1.0, None, None)


if __name__ == "__main__":
    main(sys.argv[1:])
