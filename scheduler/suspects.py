"""Which request made the shard fail: those that were in several failed steps run alone, once."""

from collections.abc import Iterable
from typing import Final

from scheduler.request import Request
from scheduler.step_plan import StepPlan

# A request that was in this many failed steps is suspected; one more, alone, and it is found out.
SUSPECT_AFTER_FAILED_STEPS: Final = 3
# By then a suspect is past the place of its failures, as no more than two steps were in flight.
CLEARED_AFTER_STEPS_ALONE: Final = 3


class Suspects:
    """While there are any, nobody else runs, and of them one at a time."""

    def __init__(self) -> None:
        self._requests: set[Request] = set()

    def __bool__(self) -> bool:
        return bool(self._requests)

    def __contains__(self, request: Request) -> bool:
        return request in self._requests

    def blame(self, plans: Iterable[StepPlan]) -> list[Request]:
        """Counts a failed step against every request that was in it; returns those that failed alone too."""
        requests = {sequence.request for plan in plans for sequence, _ in plan.scheduled}
        for request in requests:
            request.failed_steps += 1
            request.steps_alone = 0
            if request.failed_steps >= SUSPECT_AFTER_FAILED_STEPS and not request.finished:
                self._requests.add(request)
        return [request for request in requests if request.failed_steps > SUSPECT_AFTER_FAILED_STEPS]

    def succeeded(self, request: Request) -> bool:
        """A suspect has sampled in a step; returns whether that clears it."""
        request.steps_alone += 1
        if request.steps_alone < CLEARED_AFTER_STEPS_ALONE:
            return False
        request.failed_steps = request.steps_alone = 0
        self._requests.remove(request)
        return True

    def discard(self, request: Request) -> None:
        """It has ended."""
        self._requests.discard(request)
