"""When the step behind the one that runs is planned: as late as it can be, for what arrives meanwhile."""

from collections import deque
from typing import Final

# What planning, the wire and a late wake-up may take, so that the shard never waits for its next command.
LEAD_S: Final = 0.010
# The shortest of so many steps tells how long one may take; a long one amid short ones delays nothing.
REMEMBERED_STEPS: Final = 8


class Pace:
    """Learns how long steps take.

    A step that is planned the moment there is room for it sits in the shard's queue for as long as its
    predecessor runs, and a request that comes in that time waits a whole step longer than it need.
    """

    def __init__(self) -> None:
        self._durations: deque[float] = deque(maxlen=REMEMBERED_STEPS)

    def observe(self, duration: float) -> None:
        """A step had the shard for `duration` seconds."""
        self._durations.append(duration)

    def hold_s(self, running_s: float) -> float:
        """Seconds until the next step is to be planned; the shard has run the one before for `running_s`."""
        return max(0.0, min(self._durations, default=0.0) - LEAD_S - running_s)
