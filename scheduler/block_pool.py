"""All physical blocks of one tier: who holds them and which are free."""

from collections import deque
from collections.abc import Iterable


class BlockPool:
    """Ref counts and the free list of `num_blocks` blocks, ids from 0.

    Every operation is O(1) per block. The pool knows ids only: content lies in the shards, which execute
    commands in order, so a block may be given out again in the very command after the one that last used it.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._free = deque(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can give out now."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that at least one table holds."""
        return self.num_blocks - len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Gives out `count` blocks with a ref count of 1, the longest free first.

        Raises:
            ValueError: fewer than `count` are free.
        """
        if count > len(self._free):
            raise ValueError(f"{count} blocks wanted, {len(self._free)} free")
        blocks = [self._free.popleft() for _ in range(count)]
        for block in blocks:
            self._ref_counts[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Adds a holder to blocks that are in use."""
        for block in blocks:
            if not self._ref_counts[block]:
                raise ValueError(f"block {block} is free")
            self._ref_counts[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """Drops one holder of each block; the last one frees it."""
        for block in blocks:
            if not self._ref_counts[block]:
                raise ValueError(f"block {block} is free already")
            self._ref_counts[block] -= 1
            if not self._ref_counts[block]:
                self._free.append(block)

    def check(self, tables: Iterable[Iterable[int]]) -> None:
        """Recounts everything against the tables that hold blocks.

        Raises:
            AssertionError: a count is wrong; the message says which.
        """
        counted = [0] * self.num_blocks
        for table in tables:
            for block in table:
                counted[block] += 1
        if counted != self._ref_counts:
            raise AssertionError(f"ref counts {self._ref_counts}, tables hold {counted}")
        free = sorted(self._free)
        if free != [block for block, count in enumerate(counted) if not count]:
            raise AssertionError(f"free list {free}, ref counts {counted}")
