"""The block tables of all sequences, and the moves of K and V that a step's command must carry.

From one `take_moves` to the next lies one plan. In a command, swap-outs come before block copies, copies
before swap-ins, and all of them before compute; so a block freed in a plan may be given out in the same plan.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from scheduler.block_pool import BlockPool
from scheduler.request import Sequence
from scheduler.totals import Totals

# (source, destination)
Move = tuple[int, int]


@dataclass
class TableUpdate:
    """Blocks of a sequence from logical block `start` on, and what must be copied into them."""

    start: int
    block_ids: list[int] = field(default_factory=list)
    copies: list[Move] = field(default_factory=list)


@dataclass
class Moves:
    """What one command does to blocks before it computes."""

    updates: dict[Sequence, TableUpdate] = field(default_factory=dict)
    # Sequences whose first block to write is their own by now.
    grown: set[Sequence] = field(default_factory=set)
    swap_outs: list[Move] = field(default_factory=list)
    swap_ins: list[Move] = field(default_factory=list)
    # Of the device blocks that are swapped in, the host blocks that they come from.
    incoming: dict[int, int] = field(default_factory=dict)


class BlockManager:
    """Device and host pool, and the tables that hold their blocks."""

    def __init__(self, num_blocks: int, num_host_blocks: int, block_size: int, totals: Totals) -> None:
        self.block_size = block_size
        self.totals = totals
        self.device = BlockPool(num_blocks, totals)
        self.host = BlockPool(num_host_blocks, totals)
        self._moves = Moves()

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def take_moves(self) -> Moves:
        """The moves since the last call."""
        moves, self._moves = self._moves, Moves()
        self.totals.copies += sum(len(update.copies) for update in moves.updates.values())
        self.totals.swapped_out += len(moves.swap_outs)
        self.totals.swapped_in += len(moves.swap_ins)
        return moves

    @property
    def swapping(self) -> bool:
        """Whether there are swaps to carry out, whatever else the next command does."""
        return bool(self._moves.swap_outs or self._moves.swap_ins)

    # Growing.

    def has_room(self, sequence: Sequence, count: int) -> bool:
        """Whether `grow` has nothing to do, as for most tokens."""
        computed, table = sequence.num_computed, sequence.block_table
        if computed + count > len(table) * self.block_size:
            return False
        return not computed % self.block_size or self.device.is_writable(table[computed // self.block_size])

    def grow(self, sequence: Sequence, count: int) -> bool:
        """Makes room for the next `count` tokens; False, and nothing changed, when the pool can't give it.

        The block that the first of them goes to is copied if another table holds it too (copy-on-write).
        """
        table, first = sequence.block_table, sequence.num_computed // self.block_size
        copy = self._must_copy(sequence)
        missing = max(self.blocks_for(sequence.num_computed + count) - len(table), 0)
        if missing + copy > self.device.num_available:
            return False
        self._moves.grown.add(sequence)
        if not missing and not copy:
            return True
        start = first if copy else len(table)
        update = self._moves.updates.setdefault(sequence, TableUpdate(start))
        if copy:
            (replacement,) = self.device.allocate(1)
            if table[first] in self._moves.incoming:
                # Its content comes with this command too, and after the copies.
                self._moves.swap_ins.append((self._moves.incoming[table[first]], replacement))
            else:
                update.copies.append((table[first], replacement))
            self.device.free(table[first : first + 1])
            table[first] = replacement
        table += self.device.allocate(missing)
        update.block_ids = table[update.start :]
        return True

    def room(self, sequence: Sequence) -> int:
        """Tokens that `grow` could make room for, unless a block has to be copied first."""
        blocks = len(sequence.block_table) + self.device.num_available
        return blocks * self.block_size - sequence.num_computed

    def _must_copy(self, sequence: Sequence) -> bool:
        """Whether the next token goes into a block that others hold. Blocks past it were never shared."""
        index, offset = divmod(sequence.num_computed, self.block_size)
        if not offset or sequence in self._moves.grown:
            return False
        return not self.device.is_writable(sequence.block_table[index])

    # Sharing.

    def find_prefix(self, sequence: Sequence) -> list[int]:
        """Blocks that hold the sequence's first tokens already, at most `max_prefix` of them."""
        sequence.hash_blocks(self.block_size)
        blocks = []
        for content in sequence.block_hashes[: sequence.max_prefix // self.block_size]:
            block = self.device.find(content)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_needed(self, sequence: Sequence, prefix: list[int]) -> int:
        """Available blocks that admitting the sequence, all its tokens, would take."""
        revived = sum(not self.device.ref_count(block) for block in prefix)
        return self.blocks_for(sequence.length) - len(prefix) + revived

    def attach(self, sequence: Sequence, prefix: list[int]) -> None:
        """Begins the sequence's table with blocks that hold its first tokens."""
        self.device.share(prefix)
        sequence.block_table = prefix
        sequence.num_computed = len(prefix) * self.block_size
        sequence.num_registered = len(prefix)
        self.totals.queried_tokens += sequence.length
        self.totals.hit_tokens += sequence.num_computed

    def register_full(self, sequence: Sequence) -> None:
        """`register`, where a block has become full; costs next to nothing where none has."""
        full = (sequence.num_registered + 1) * self.block_size
        if sequence.num_computed >= full and len(sequence.token_ids) >= full:
            self.register(sequence, sequence.num_computed)

    def register(self, sequence: Sequence, num_sent: int) -> None:
        """Makes full blocks findable once their tokens are known and the command that writes them is planned.

        `num_sent` counts the tokens that are computed when that command is done.
        """
        sequence.hash_blocks(self.block_size)
        full = min(num_sent // self.block_size, len(sequence.block_hashes))
        for index in range(sequence.num_registered, full):
            self.device.register(sequence.block_table[index], sequence.block_hashes[index])
        sequence.num_registered = max(sequence.num_registered, full)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """The child holds every block of the parent; the first to write into the last one copies it."""
        child.block_table = list(parent.block_table)
        child.host_table = list(parent.host_table)
        self.device.share(child.block_table)
        self.host.share(child.host_table)
        child.num_computed = parent.num_computed
        child.block_hashes = list(parent.block_hashes)
        child.num_registered = parent.num_registered

    def release(self, sequence: Sequence) -> None:
        """Frees whatever the sequence holds, on either tier."""
        self._moves.updates.pop(sequence, None)
        self.device.free(sequence.block_table)
        self.host.free(sequence.host_table)
        sequence.block_table = []
        sequence.host_table = []
        sequence.num_registered = 0

    # Swapping.

    def swap_out(self, sequences: list[Sequence]) -> bool:
        """Moves all blocks of one request to the host; False, and nothing changed, when they don't fit."""
        filled = {s: s.block_table[: self.blocks_for(s.num_computed)] for s in sequences}
        distinct = dict.fromkeys(block for table in filled.values() for block in table)
        if len(distinct) > self.host.num_available:
            return False
        # Not carried out yet, so what it would copy lies elsewhere still.
        pending = {new: old for s in sequences for old, new in self._copies_of(s)}
        host_of = dict(zip(distinct, self.host.allocate(len(distinct)), strict=True))
        self._moves.swap_outs += [(pending.get(block, block), host_of[block]) for block in distinct]
        seen: set[int] = set()
        for sequence, table in filled.items():
            host_table = [host_of[block] for block in table]
            self.host.share(block for block in host_table if block in seen)
            seen.update(host_table)
            self.release(sequence)
            sequence.host_table = host_table
        return True

    def _copies_of(self, sequence: Sequence) -> list[Move]:
        update = self._moves.updates.get(sequence)
        return update.copies if update else []

    def num_needed_to_swap_in(self, sequences: Iterable[Sequence]) -> int:
        """Available blocks that `swap_in` would take; content that the device still has costs none."""
        sources: set[int] = set()
        revived: set[int] = set()
        for sequence in sequences:
            for index, host_block in enumerate(sequence.host_table):
                block = self._on_device(sequence, index)
                if block is None:
                    sources.add(host_block)
                elif not self.device.ref_count(block):
                    revived.add(block)
        return len(sources) + len(revived)

    def swap_in(self, sequences: list[Sequence]) -> None:
        """Brings all blocks of one request back, and shares again what was shared."""
        device_of: dict[int, int] = {}
        for sequence in sequences:
            # First, so that no cached block that another one needs is evicted.
            found = [self._on_device(sequence, index) for index in range(len(sequence.host_table))]
            self.device.share(block for block in found if block is not None)
            sequence.block_table = [-1 if block is None else block for block in found]
        for sequence in sequences:
            for index, host_block in enumerate(sequence.host_table):
                if sequence.block_table[index] >= 0:
                    continue
                if host_block in device_of:
                    self.device.share([device_of[host_block]])
                else:
                    (device_of[host_block],) = self.device.allocate(1)
                    self._moves.swap_ins.append((host_block, device_of[host_block]))
                    self._moves.incoming[device_of[host_block]] = host_block
                sequence.block_table[index] = device_of[host_block]
            self.host.free(sequence.host_table)
            sequence.host_table = []
            sequence.num_registered = 0

    def _on_device(self, sequence: Sequence, index: int) -> int | None:
        """The device block with the content of a full block that was swapped out."""
        if index >= min(len(sequence.block_hashes), sequence.num_computed // self.block_size):
            return None
        return self.device.find(sequence.block_hashes[index])

    # Accounting.

    def partial_blocks(self, running: Iterable[Sequence]) -> dict[int, int]:
        """Used device blocks that aren't full, with how many of their token slots hold no token.

        Another thread may ask, while steps go on.
        """
        empty: dict[int, int] = {}
        for sequence in tuple(running):
            num_computed, table = sequence.num_computed, tuple(sequence.block_table)
            for index in range(num_computed // self.block_size, len(table)):
                filled = max(num_computed - index * self.block_size, 0)
                # What one holder of a shared block filled is filled.
                empty[table[index]] = min(empty.get(table[index], self.block_size), self.block_size - filled)
        return empty

    def waste_ratio(self, running: Iterable[Sequence]) -> float:
        """Share of allocated token slots that hold no token; shared blocks count once."""
        allocated = self.device.num_used * self.block_size
        return sum(self.partial_blocks(running).values()) / allocated if allocated else 0.0
