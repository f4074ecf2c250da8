"""What a scheduler has counted since it started. Its pools begin anew with each epoch; this does not."""

from dataclasses import dataclass


@dataclass
class Totals:
    """Blocks, tokens and preemptions."""

    copies: int = 0
    evictions: int = 0
    swapped_out: int = 0
    swapped_in: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0
    recomputes: int = 0
    swaps: int = 0

    @property
    def preemptions(self) -> int:
        """Of either mode."""
        return self.recomputes + self.swaps
