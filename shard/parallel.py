"""Tensor parallelism: which part of a model is a rank's, and how ranks put their results together.

Columns, then rows, as in Megatron-LM (arXiv 1909.08053, section 3): each rank has some heads and some of the
MLP's inner features, or some whole experts, and two sums over all ranks per layer make the hidden state
whole. Where there are more ranks than KV heads, neighbouring ranks hold the same one.
"""

import fcntl
import logging
import os
import re
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from shard.model_config import ModelConfig, ModelError

RENDEZVOUS_TIMEOUT_S: Final = 30.0
_SIOCGIFADDR: Final = 0x8915

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Partition:
    """One rank's part."""

    rank: int = 0
    world_size: int = 1

    def of(self, config: ModelConfig) -> ModelConfig:
        """The sizes of this rank's part; vocabulary and hidden size stay those of the whole.

        Raises:
            ModelError: the model can't be divided among so many ranks.
        """
        experts = config.experts
        sizes = {"num_attention_heads": config.num_heads}
        if experts is None or not all(experts.layers):
            sizes["intermediate_size"] = config.intermediate_size
        if experts:
            sizes["num_experts"] = experts.num_experts
            sizes["shared_expert_intermediate_size"] = experts.shared_size
        for name, size in sizes.items():
            if size % self.world_size:
                raise ModelError(f"--tensor-parallel-size {self.world_size} doesn't divide {name} {size}")
        kv_heads = config.num_kv_heads
        if kv_heads % self.world_size and self.world_size % kv_heads:
            raise ModelError(
                f"--tensor-parallel-size {self.world_size} neither divides num_key_value_heads {kv_heads} "
                "nor is a multiple of it"
            )
        return replace(
            config,
            num_heads=config.num_heads // self.world_size,
            num_kv_heads=len(self.kv_heads(kv_heads)),
            intermediate_size=config.intermediate_size // self.world_size,
        )

    def share(self, size: int) -> range:
        """This rank's part of `size` things, which the ranks divide evenly."""
        part = size // self.world_size
        return range(self.rank * part, (self.rank + 1) * part)

    def kv_heads(self, number: int) -> range:
        """This rank's KV heads."""
        if number >= self.world_size:
            return self.share(number)
        head = self.rank * number // self.world_size
        return range(head, head + 1)

    def vocabulary(self, size: int) -> range:
        """This rank's token ids: the last ranks may have fewer than the others, or none."""
        part = -(-size // self.world_size)
        return range(min(self.rank * part, size), min((self.rank + 1) * part, size))


WHOLE: Final = Partition()


def use_interface(host: str) -> None:
    """Binds what ranks tell each other to the interface that has this address, and so to no other network.

    The libraries below take its name from the environment, and from nowhere else; what the user set stays.

    Raises:
        ModelError: `host` is no IPv4 address of this machine.
    """
    try:
        address = socket.gethostbyname(host)
    except OSError as error:
        raise ModelError(f"--rendezvous-host {host}: {error.strerror}") from error
    name = next((name for _, name in socket.if_nameindex() if _address_of(name) == address), None)
    if name is None:
        raise ModelError(f"--rendezvous-host {host}: no network interface of this machine has that address")
    for library in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", name)


def _address_of(interface: str) -> str | None:
    """The first IPv4 address (netdevice(7), SIOCGIFADDR)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


class RankMismatchError(ValueError):
    """The ranks of a group don't belong together; the message says in what they differ."""


class RankLostError(Exception):
    """Another rank is gone, hangs, or can't be reached. The group may be formed anew."""


class Rendezvous:
    """Where the ranks of a group find each other: rank 0 serves it, for as long as its process lives."""

    def __init__(self, host: str) -> None:
        """Listens on a free port."""
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        self.address = f"{host}:{self._store.port}"


@contextmanager
def _losing(meaning: str) -> Iterator[None]:
    """For a lost rank, torch has but RuntimeErrors, which begin with a place in its code."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        reason = re.sub(r"^\[\S+\] ", "", str(error)).partition("\n")[0]
        raise RankLostError(f"{meaning}: {reason}") from error


class RankGroup:
    """The ranks of one model. Collectives block until every rank takes part.

    They raise RankLostError if one is gone.

    Before the first `join`, a rank is alone: it can be run, to learn how much memory that takes.

    Attributes:
        rank: This one.
        world_size: How many there are.
    """

    def __init__(self, partition: Partition, device: torch.device, timeout_s: float, identity: str) -> None:
        """A collective that takes longer than `timeout_s` fails. All ranks must say the same `identity`."""
        self.rank, self.world_size = partition.rank, partition.world_size
        self._device, self._identity = device, identity
        self._backend = "nccl" if device.type == "cuda" else "gloo"
        self._timeout = timedelta(seconds=timeout_s)

    def join(self, address: str, epoch: int, configuration: str) -> None:
        """Forms the group of an epoch at rank 0's `Rendezvous`, instead of the one that there was.

        Raises:
            RankMismatchError: another rank has another identity or configuration.
            RankLostError: not all ranks came in time.
        """
        self.leave()
        agreed = f"{self._identity}, {configuration}"
        host, _, port = address.rpartition(":")
        waiting = timedelta(seconds=RENDEZVOUS_TIMEOUT_S)
        with _losing(f"rank {self.rank} can't reach rank 0 at {address}, its --rendezvous-host"):
            store = PrefixStore(f"epoch-{epoch}", TCPStore(host, int(port), timeout=waiting))
            store.set(f"agreed-{self.rank}", agreed)
        for rank in range(self.world_size):
            with _losing(f"rank {rank} didn't come to {address} within {RENDEZVOUS_TIMEOUT_S:g} s"):
                theirs = store.get(f"agreed-{rank}").decode()
            if theirs != agreed:
                raise RankMismatchError(f"rank {self.rank} has {agreed}; rank {rank} has {theirs}")
        with _losing(
            f"rank {self.rank} met the others at {address} but can't connect to all of them; the "
            "--rendezvous-host of each must be its own machine's address"
        ):
            dist.init_process_group(
                self._backend, store=store, rank=self.rank, world_size=self.world_size, timeout=self._timeout
            )
        log.info("rank %d of %d joined epoch %d at %s", self.rank, self.world_size, epoch, address)

    def leave(self) -> None:
        """Ends the group, whatever its other ranks do."""
        if dist.is_initialized():
            dist.destroy_process_group()

    @_losing("another rank is gone or hangs")
    def any(self, flag: bool) -> bool:
        """Whether it is true on any rank."""
        count = torch.tensor([int(flag)], device=self._device)
        dist.all_reduce(count)
        return bool(count.item())

    @_losing("another rank is gone or hangs")
    def all_reduce(self, x: Tensor) -> None:
        """Sums `x` over all ranks, in place.

        On CPUs in the order of the ranks. Gloo's own order depends on where in `x` a number stands, so beyond
        two ranks a token's sums would depend on its batch; so do NCCL's.
        """
        if not dist.is_initialized():
            return
        if self.world_size == 2 or self._backend != "gloo":
            dist.all_reduce(x)
            return
        parts = [torch.empty_like(x) for _ in range(self.world_size)]
        dist.all_gather(parts, x)
        x.copy_(parts[0])
        for part in parts[1:]:
            x.add_(part)

    @_losing("another rank is gone or hangs")
    def broadcast(self, x: Tensor) -> None:
        """Rank 0's `x` on all ranks, in place."""
        dist.broadcast(x, 0)

    @_losing("another rank is gone or hangs")
    def gather(self, x: Tensor) -> list[Tensor] | None:
        """Every rank's `x`, all of one shape, on rank 0; elsewhere None."""
        parts = None if self.rank else [torch.empty_like(x) for _ in range(self.world_size)]
        if dist.is_initialized():
            dist.gather(x, parts, dst=0)
        return parts
