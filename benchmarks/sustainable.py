"""How many requests a second each server sustains, on the same memory, hardware and requests."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, Protocol

from benchmarks.baselines import ReservingServer, reserve_max, reserve_oracle, reserve_pow2
from benchmarks.cost_model import CostModel
from benchmarks.measurements import Measurements
from benchmarks.paged import PagedServer
from benchmarks.traces import Trace
from scheduler.limits import Limits


class Server(Protocol):
    """Serves one trace in virtual time."""

    def run(self, trace: Trace) -> Measurements:
        """Serves the trace to its end."""


class Point(NamedTuple):
    """One run: requests a second, and the mean normalised latency in seconds per output token."""

    rate: float
    normalised_latency_s: float


@dataclass(frozen=True)
class Machine:
    """What all servers get."""

    limits: Limits
    cost: CostModel

    def paged(self, prefix_caching: bool = False) -> PagedServer:
        """Ours; without prefix caching, paging alone is compared."""
        return PagedServer(replace(self.limits, prefix_caching=prefix_caching), self.cost)

    def reserving(self, name: str) -> ReservingServer:
        """One of `BASELINES`."""
        limits = self.limits
        reserve = {"max": reserve_max(limits.max_model_len), "pow2": reserve_pow2, "oracle": reserve_oracle}
        batching, _, reservation = name.partition("-")
        return ReservingServer(
            limits.num_blocks * limits.block_size,
            limits.max_num_seqs,
            reserve[reservation],
            self.cost,
            continuous=batching == "continuous",
        )

    def server(self, name: str) -> Server:
        """A new one, by its name in `PAGED` or `BASELINES`."""
        return self.paged(name == CACHING) if name in PAGED else self.reserving(name)


CACHING: Final = "paged-caching"
PAGED: Final = ("paged", CACHING)
BASELINES: Final = ("static-max", "continuous-max", "continuous-pow2", "continuous-oracle")


@dataclass(frozen=True)
class Search:
    """Finds the highest rate, up to `highest`, with a mean normalised latency of `bound_s` at most.

    `trace_at` gives the same requests at any rate, so latency grows with the rate.
    """

    trace_at: Callable[[float], Trace]
    bound_s: float
    lowest: float = 0.01
    highest: float = 100.0
    # Of the rate, when to stop.
    precision: float = 0.02

    def at(self, rate: float, server: Server) -> Point:
        """One run."""
        return Point(rate, server.run(self.trace_at(rate)).normalised_latency)

    def find(self, new_server: Callable[[], Server], start: float = 1.0) -> Point:
        """Doubles or halves from `start`, then bisects; the last point within the bound."""
        good, bad = Point(0.0, 0.0), math.inf
        rate = start
        while bad > good.rate * (1 + self.precision) and rate <= self.highest:
            point = self.at(rate, new_server())
            if point.normalised_latency_s <= self.bound_s:
                good = point
            else:
                bad = rate
            if not good.rate:
                rate = bad / 2
            else:
                rate = good.rate * 2 if bad == math.inf else math.sqrt(good.rate * bad)
            if rate < self.lowest:
                raise ValueError(f"no rate from {self.lowest} a second up keeps within {self.bound_s} s")
        return good

    def curve(self, new_server: Callable[[], Server], around: float) -> list[Point]:
        """Latency at rates below and above a sustainable one."""
        factors = (0.25, 0.5, 0.75, 0.9, 1.0, 1.05, 1.1, 1.2, 1.35)
        return [self.at(around * factor, new_server()) for factor in factors]
