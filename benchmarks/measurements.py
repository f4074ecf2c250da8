"""What a simulated server's clients and its operator see."""

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from benchmarks.traces import TraceRequest


class Histogram:
    """Counts of durations in seconds, in buckets of 1 %, for percentiles of millions of them."""

    _WIDTH = math.log(1.01)

    def __init__(self) -> None:
        self._buckets: Counter[int] = Counter()

    def add(self, seconds: float, count: int = 1) -> None:
        """`count` durations of `seconds` each."""
        self._buckets[math.floor(math.log(max(seconds, 1e-6)) / self._WIDTH)] += count

    @property
    def count(self) -> int:
        """All durations."""
        return self._buckets.total()

    def percentile(self, percent: float) -> float:
        """Seconds that `percent` of the durations don't exceed, to 1 %; 0 if there are none."""
        wanted = self.count * percent / 100
        for bucket in sorted(self._buckets):
            wanted -= self._buckets[bucket]
            if wanted <= 0:
                return math.exp((bucket + 0.5) * self._WIDTH)
        return 0.0


@dataclass
class Measurements:
    """Latencies in seconds of virtual time, and token slots summed over steps."""

    ttft: Histogram = field(default_factory=Histogram)
    itl: Histogram = field(default_factory=Histogram)
    # By index of the request in its trace: how often it finished, which should be once.
    finishes: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    normalised_latency_sum: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    steps: int = 0
    end_s: float = 0.0
    sequence_steps: int = 0
    allocated_slots: int = 0
    empty_slots: int = 0
    peak_slots: int = 0

    def finish(self, index: int, request: TraceRequest, arrival_s: float, now: float) -> None:
        """All outputs of a request have ended."""
        self.finishes[index] += 1
        self.normalised_latency_sum += (now - arrival_s) / request.output_length
        self.prompt_tokens += request.prompt_length
        self.output_tokens += request.output_length * request.n
        self.end_s = now

    def hold(self, allocated: int, empty: int) -> None:
        """One step's token slots: those set aside, and those of them without a token."""
        self.allocated_slots += allocated
        self.empty_slots += empty
        self.peak_slots = max(self.peak_slots, allocated)

    @property
    def normalised_latency(self) -> float:
        """Mean over requests of seconds from arrival to end, per output token (paper, section 6.1)."""
        return self.normalised_latency_sum / max(len(self.finishes), 1)

    @property
    def waste_ratio(self) -> float:
        """Share of the slots set aside, summed over steps, that held no token."""
        return self.empty_slots / max(self.allocated_slots, 1)

    def summary(self) -> dict[str, float | int]:
        """As printed; times in seconds."""
        return {
            "finished": len(self.finishes),
            "virtual_s": round(self.end_s, 1),
            "requests_per_s": round(len(self.finishes) / max(self.end_s, 1e-9), 3),
            "output_tokens_per_s": round(self.output_tokens / max(self.end_s, 1e-9), 1),
            "mean_running": round(self.sequence_steps / max(self.steps, 1), 1),
            "normalised_latency_s": round(self.normalised_latency, 4),
            **{f"ttft_p{p}_s": round(self.ttft.percentile(p), 3) for p in (50, 90, 99)},
            **{f"itl_p{p}_s": round(self.itl.percentile(p), 4) for p in (50, 90, 99)},
            "waste_ratio": round(self.waste_ratio, 4),
        }
