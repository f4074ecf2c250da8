"""The numbers of a step on their way to the device, in one copy."""

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

# Commands in flight, and one that is being written.
_BUFFERS: Final = 3


class Upload:
    """Packs integers and copies them, without waiting, into a buffer on the device that stays where it is.

    On a CPU they are packed where they are read. What `send` returns is good until the next `send`.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        """`capacity`: integers that usually suffice. More are sent too, for an allocation."""
        self.buffer = torch.zeros(capacity, dtype=torch.int64, device=device)
        """Holds the first of them, in the order in which they were sent."""
        self._pinned = device.type == "cuda"
        # Written in turn: the copy from one is over before it's written again.
        self._hosts = [self._allocate(capacity) for _ in range(_BUFFERS)] if self._pinned else [self.buffer]
        self._copied = [torch.cuda.Event() for _ in self._hosts] if self._pinned else []  # type: ignore[no-untyped-call]
        self._capacity, self._turn = capacity, 0
        self._empty = self.buffer[:0]

    def send(self, *sections: Sequence[int] | np.ndarray) -> Sequence[Tensor]:
        """Each section on the device, `[len(section)]` int64."""
        total = sum(map(len, sections))
        fits = total <= self._capacity
        host = self._next() if fits else self._allocate(total)
        numbers, end = host.numpy(), 0
        places = []
        for section in sections:
            start, end = end, end + len(section)
            places.append((start, end))
            if start < end:
                numbers[start:end] = section
        sent = self.buffer
        if not fits:
            sent = host.to(self.buffer.device, non_blocking=True)
            self.buffer.copy_(sent[: self._capacity])
        elif self._pinned:
            self.buffer[:total].copy_(host[:total], non_blocking=True)
            self._copied[self._turn].record()
        return [sent[start:end] if start < end else self._empty for start, end in places]

    def _next(self) -> Tensor:
        self._turn = (self._turn + 1) % len(self._hosts)
        if self._pinned:
            self._copied[self._turn].synchronize()
        return self._hosts[self._turn]

    def _allocate(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int64, pin_memory=self._pinned)
