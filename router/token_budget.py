"""How many tokens a tenant may still use of this router, on average over a minute."""

import time
from collections.abc import Callable


class TokenBudget:
    """A token bucket that may fall below zero: what runs goes on, and what comes next waits for the rest.

    It holds a minute's worth of tokens at most, and refills steadily.
    """

    def __init__(self, tokens_per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Full. `clock` gives seconds."""
        self.tokens_per_minute = tokens_per_minute
        self._clock = clock
        self._level = float(tokens_per_minute)
        self._filled_at = clock()

    def take(self, count: int) -> None:
        """Uses tokens, also those that aren't there."""
        self._refill()
        self._level -= count

    def wait_s(self) -> float:
        """Seconds until nothing is owed; 0: nothing is."""
        self._refill()
        return max(0.0, -self._level * 60 / self.tokens_per_minute)

    def _refill(self) -> None:
        now = self._clock()
        refilled = self._level + (now - self._filled_at) * self.tokens_per_minute / 60
        self._level = min(refilled, float(self.tokens_per_minute))
        self._filled_at = now
