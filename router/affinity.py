"""Which replica a prompt goes to: the one that has most of it in its prefix cache, unless it is far busier.

Where a prompt went is remembered for a while, block by block. What isn't remembered goes where the hash of
its beginning says, so that routers that never spoke to each other agree, and a replica that comes or goes
moves its own share alone (rendezvous hashing, Thaler and Ravishankar 1998). Loads are bounded as in
"Consistent Hashing with Bounded Loads" (arXiv 1608.01350): a replica far above the mean gets nothing.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

# Tokens that are hashed together. Nothing depends on the replicas' block size being the same.
BLOCK_TOKENS: Final = 16
# A prompt of which nothing is known goes by so much of its beginning.
FIRST_BLOCKS: Final = 4
# Of the mean load; and tokens that are nobody's overload.
BOUND: Final = 1.1
SLACK_TOKENS: Final = 256
MAX_REMEMBERED: Final = 1 << 17
# Of one prompt. What comes after so many tells little more, and takes milliseconds to hash.
MAX_BLOCKS: Final = 2048


def block_hashes(token_ids: Sequence[int], salt: str) -> list[bytes]:
    """Of each of the first full blocks and all that comes before it.

    `salt` keeps those apart who share no blocks.
    """
    previous, hashes = salt.encode(), []
    numbers = array("I", token_ids[: MAX_BLOCKS * BLOCK_TOKENS])
    for start in range(0, len(numbers) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        block = numbers[start : start + BLOCK_TOKENS].tobytes()
        previous = hashlib.blake2b(previous + block, digest_size=8).digest()
        hashes.append(previous)
    return hashes


class PrefixAffinity:
    """Remembers where the blocks of recent prompts went. A hint: what it forgets costs a recompute."""

    def __init__(self, max_remembered: int = MAX_REMEMBERED) -> None:
        """`max_remembered`: blocks."""
        self._places: OrderedDict[bytes, str] = OrderedDict()
        self._max_remembered = max_remembered

    def choose(self, hashes: Sequence[bytes], loads: Mapping[str, int]) -> str:
        """One of the replicas in `loads`, which are tokens still to compute; the prompt is remembered there.

        `hashes`: as `block_hashes` gives them.
        """
        chosen = next(self._wanted(hashes, within_bound(loads)))
        self._remember(hashes, chosen)
        return chosen

    def _wanted(self, hashes: Sequence[bytes], candidates: Mapping[str, int]) -> Iterator[str]:
        for block in reversed(hashes):
            if (place := self._places.get(block)) is not None and place in candidates:
                yield place
        if hashes:
            beginning = hashes[min(FIRST_BLOCKS, len(hashes)) - 1]
            yield max(candidates, key=lambda name: hashlib.blake2b(beginning + name.encode()).digest())
        yield min(candidates, key=lambda name: candidates[name])

    def _remember(self, hashes: Sequence[bytes], place: str) -> None:
        # The beginning last, as it is what the most prompts share.
        for block in reversed(hashes[: self._max_remembered]):
            self._places[block] = place
            self._places.move_to_end(block)
        while len(self._places) > self._max_remembered:
            self._places.popitem(last=False)


def within_bound(loads: Mapping[str, int]) -> dict[str, int]:
    """Those that are not far busier than the others, at least one."""
    bound = BOUND * sum(loads.values()) / len(loads) + SLACK_TOKENS
    return {name: load for name, load in loads.items() if load <= bound}
