"""`python -m tests.shard.sum_process RANK WORLD_SIZE RENDEZVOUS`: sums what `part` gives each rank.

Rank 0 prints the address of its rendezvous first; all print the sum as hexadecimal bytes.
"""

import sys

import torch
from torch import Tensor

from shard.parallel import Partition, RankGroup, Rendezvous


def part(rank: int) -> Tensor:
    """Numbers of such different sizes that the order of their sum shows."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(1000, generator=generator) * 10.0 ** torch.randint(-6, 6, (1000,), generator=generator)


def main() -> None:
    """See the module."""
    partition, address = Partition(int(sys.argv[1]), int(sys.argv[2])), sys.argv[3]
    meeting = Rendezvous("127.0.0.1") if not partition.rank else None
    if meeting:
        address = meeting.address
        print(address, flush=True)
    ranks = RankGroup(partition, torch.device("cpu"), 60, "a test")
    ranks.join(address, 1, "")
    x = part(partition.rank)
    ranks.all_reduce(x)
    print(x.numpy().tobytes().hex(), flush=True)
    ranks.leave()


if __name__ == "__main__":
    main()
