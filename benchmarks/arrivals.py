"""The requests of a trace in the order in which they arrive, also where one waits for another's end."""

import heapq
from collections import defaultdict

from benchmarks.traces import Trace


class ArrivalQueue:
    """Requests still to arrive, by virtual time in seconds."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._followers: defaultdict[int, list[int]] = defaultdict(list)
        self._heap: list[tuple[float, int]] = []
        for index, request in enumerate(trace):
            if request.follows is None:
                self._heap.append((request.arrival_s, index))
            else:
                self._followers[request.follows].append(index)
        heapq.heapify(self._heap)

    @property
    def next_s(self) -> float | None:
        """When the next one arrives, as far as is known; None if none does."""
        return self._heap[0][0] if self._heap else None

    def until(self, now: float) -> list[tuple[float, int]]:
        """Takes those that have arrived by `now`: (arrival in seconds, index)."""
        arrived = []
        while self._heap and self._heap[0][0] <= now:
            arrived.append(heapq.heappop(self._heap))
        return arrived

    def finished(self, index: int, now: float) -> None:
        """A request ended, so those that follow it will arrive."""
        for follower in self._followers.pop(index, ()):
            heapq.heappush(self._heap, (now + self._trace[follower].arrival_s, follower))
