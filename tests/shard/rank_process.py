"""One rank of a tensor-parallel group in a process of its own; the whole model in one, without a group.

`python -m tests.shard.rank_process RANK WORLD_SIZE RENDEZVOUS FOLDER...` serves each model for a few steps,
and prints what came of it as one JSON line each. Rank 0 prints the address of its rendezvous first.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from pagoda.shard.v1.shard_pb2 import BlockUpdate, ConfigureRequest, ExecuteRequest, Fork, Join, Scheduled
from pagoda.v1.sampling_pb2 import SamplingParams
from shard import kv_cache
from shard.executor import StepExecutor
from shard.model_config import load_model_config
from shard.parallel import WHOLE, Partition, RankGroup, Rendezvous
from shard.weights import load_model
from tests.oracle import random_tokens

CPU = torch.device("cpu")
STEPS = 12
GREEDY = SamplingParams(temperature=0, top_p=1, repetition_penalty=1)
DRAWN = SamplingParams(temperature=1, top_p=0.9, repetition_penalty=1.1, seed=7)


def commands() -> list[ExecuteRequest]:
    """Two prompts, one of them in chunks and forked at its end; then decodes of all three."""
    chunked = Join(
        slot=0,
        token_ids=random_tokens(19, seed=1),
        prompt_length=19,
        block_ids=range(8),
        sampling=DRAWN,
        prompt_logprobs=2,
    )
    whole = Join(
        slot=1, token_ids=random_tokens(6, seed=2), prompt_length=6, block_ids=range(8, 14), sampling=GREEDY
    )
    copy = Join(
        slot=2,
        prompt_length=19,
        computed_length=19,
        block_ids=[0, 1, 2, 3, 14],
        sampling=DRAWN,
        output_index=1,
    )
    first = ExecuteRequest(
        joins=[chunked, whole],
        scheduled=[Scheduled(slot=0, num_tokens=11), Scheduled(slot=1, num_tokens=6)],
    )
    second = ExecuteRequest(
        scheduled=[Scheduled(slot=0, num_tokens=8), Scheduled(slot=1, num_tokens=1)],
        forks=[Fork(source_slot=0, targets=[copy])],
    )
    third = ExecuteRequest(
        block_updates=[BlockUpdate(slot=2, start=5, block_ids=[15, 16, 17])],
        scheduled=[Scheduled(slot=slot, num_tokens=1) for slot in range(3)],
    )
    third.copies.add(source=4, destination=14)
    others = [
        ExecuteRequest(scheduled=[Scheduled(slot=slot, num_tokens=1) for slot in range(3)])
        for _ in range(STEPS)
    ]
    return [first, second, third, *others]


def serve(folder: Path, partition: Partition, rendezvous: str, epoch: int) -> dict[str, Any]:
    """Tokens by step, the block tables afterwards, and bytes of weights and of K and V."""
    config = load_model_config(folder)
    model = load_model(folder, config, torch.float32, CPU, 128, partition=partition)
    weight_bytes = sum(placement.tensor.nbytes for placement in model.placements())
    ranks = None if partition == WHOLE else RankGroup(partition, CPU, 60, "a test's model")
    executor = StepExecutor(model.prepare(ranks), torch.float32, CPU, ranks=ranks)
    executor.configure(
        ConfigureRequest(
            epoch=epoch,
            num_blocks=18,
            block_size=4,
            max_num_seqs=3,
            max_num_batched_tokens=32,
            max_model_len=64,
            rendezvous_address=rendezvous,
        )
    )
    tokens, prompt = [], []
    for step, command in enumerate(commands()):
        command.epoch, command.step = epoch, step
        response = executor.execute(command).to_proto()
        tokens.append([sampled.token_id for sampled in response.sampled])
        prompt += [one.chosen.logprob for chunk in response.prompt_logprobs for one in chunk.positions]
    if ranks:
        ranks.leave()
    return {
        "tokens": tokens,
        "prompt_logprobs": prompt,
        "tables": executor._slots.block_tables.tolist(),
        "weight_bytes": weight_bytes,
        "kv_bytes_per_token": kv_cache.bytes_per_token(model.config, torch.float32),
    }


def main() -> None:
    """See the module."""
    rank, world_size, address, *folders = sys.argv[1:]
    partition = Partition(int(rank), int(world_size))
    meeting = Rendezvous("127.0.0.1") if partition.world_size > 1 and not partition.rank else None
    if meeting:
        address = meeting.address
        print(address, flush=True)
    for epoch, folder in enumerate(folders, start=1):
        print(json.dumps(serve(Path(folder), partition, address, epoch)), flush=True)


if __name__ == "__main__":
    main()
