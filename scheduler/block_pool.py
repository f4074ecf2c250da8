"""All physical blocks of one tier: who holds them, which are free, and what the unheld ones still contain."""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

from scheduler.totals import Totals


class BlockPool:
    """Ref counts, free list and content hashes of `num_blocks` blocks, ids from 0.

    A block that nobody holds is free, or cached if its content has a hash; a cached block is evicted, least
    recently used first, only when no block is free. Every operation is O(1) per block. The pool knows ids
    only: content lies in the shards, which execute commands in order, so a block may be given out again in
    the very command after the one that last used it.
    """

    def __init__(self, num_blocks: int, totals: Totals) -> None:
        self.num_blocks = num_blocks
        self.num_shared = 0
        self._totals = totals
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._index: dict[bytes, int] = {}
        self._free = deque(range(num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can give out now: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds and whose content is forgotten."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds and whose content can still be found."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks that at least one table holds."""
        return self.num_blocks - self.num_available

    def ref_count(self, block: int) -> int:
        """How many tables hold a block."""
        return self._ref_counts[block]

    def block_hash(self, block: int) -> bytes | None:
        """The hash under which a block's content is found, if it is."""
        return self._hashes[block]

    def allocate(self, count: int) -> list[int]:
        """Gives out `count` blocks with a ref count of 1, free ones before cached ones.

        Raises:
            ValueError: fewer than `count` are available.
        """
        if count > self.num_available:
            raise ValueError(f"{count} blocks wanted, {self.num_available} available")
        blocks = []
        for _ in range(count):
            if self._free:
                block = self._free.popleft()
            else:
                block, _ = self._cached.popitem(last=False)
                self._forget(block)
                self._totals.evictions += 1
            self._ref_counts[block] = 1
            blocks.append(block)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Adds a holder to blocks that are in use or cached.

        Raises:
            ValueError: a block is free.
        """
        for block in blocks:
            if self._ref_counts[block]:
                self.num_shared += self._ref_counts[block] == 1
            elif block in self._cached:
                del self._cached[block]
            else:
                raise ValueError(f"block {block} is free")
            self._ref_counts[block] += 1

    def free(self, table: Sequence[int]) -> None:
        """Drops one holder of each block of a table, last block first.

        So of one prefix, later blocks are evicted before those that they build on: leaves first.

        Raises:
            ValueError: a block has no holder.
        """
        for block in reversed(table):
            if not self._ref_counts[block]:
                raise ValueError(f"block {block} is free already")
            self._ref_counts[block] -= 1
            self.num_shared -= self._ref_counts[block] == 1
            if not self._ref_counts[block]:
                if self._hashes[block] is None:
                    self._free.append(block)
                else:
                    self._cached[block] = None

    def is_writable(self, block: int) -> bool:
        """Whether its one holder may write to it: nobody else reads it, by table or by hash."""
        return self._ref_counts[block] == 1 and self._hashes[block] is None

    def register(self, block: int, content: bytes) -> None:
        """Makes a used block's content findable. Of two blocks with one content, the first is."""
        if content not in self._index:
            self._index[content] = block
            self._hashes[block] = content

    def find(self, content: bytes) -> int | None:
        """The block with this content, if there is one; `share` it to keep it."""
        return self._index.get(content)

    def flush(self) -> None:
        """Forgets all content. Blocks in use stay with their holders."""
        for block in self._index.values():
            self._hashes[block] = None
        self._index.clear()
        self._free.extend(self._cached)
        self._cached.clear()

    def _forget(self, block: int) -> None:
        content = self._hashes[block]
        assert content is not None  # noqa: S101
        del self._index[content]
        self._hashes[block] = None

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
        if self.num_shared != sum(count > 1 for count in counted):
            raise AssertionError(f"{self.num_shared} blocks shared, tables say {counted}")
        unheld = sorted([*self._free, *self._cached])
        if unheld != [block for block, count in enumerate(counted) if not count]:
            raise AssertionError(f"free {self._free}, cached {list(self._cached)}, ref counts {counted}")
        hashed = {block: content for block, content in enumerate(self._hashes) if content is not None}
        if hashed != {block: content for content, block in self._index.items()}:
            raise AssertionError("the hash index and the blocks' hashes differ")
        if any(self._hashes[block] is None for block in self._cached):
            raise AssertionError("a cached block has no hash")
        if any(self._hashes[block] is not None for block in self._free):
            raise AssertionError("a free block has a hash")
