"""What the scheduler measures. Its state is read when scraped, so that steps don't pay for it."""

import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final

from prometheus_client import REGISTRY, Counter, Gauge, Histogram, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from pagoda.shard.v1.shard_pb2 import ExecuteResponse
from scheduler.limits import Limits
from scheduler.scheduler import Scheduler
from scheduler.step_plan import StepPlan

if TYPE_CHECKING:
    from scheduler.engine import Engine

_QUEUE_BUCKETS: Final = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
# From the planning of a small step to a long prefill on a slow CPU.
_STEP_BUCKETS: Final = tuple(
    digit * 10.0**power for power in range(-4, 2) for digit in (1, 2.5, 5) if digit * 10.0**power <= 25
)

STEP_TOKENS = Counter("pagoda_scheduler_step_tokens", "Tokens computed, by kind", ["kind"])
STEP_SECONDS = Histogram(
    "pagoda_scheduler_step_seconds",
    "From sending a step to its result, overlap included",
    buckets=_STEP_BUCKETS,
)
PHASE_SECONDS = Histogram(
    "pagoda_scheduler_step_phase_seconds",
    "Where a step's time goes; wire is what is left of the time that it had the shard to itself",
    ["phase"],
    buckets=_STEP_BUCKETS,
)
QUEUE_SECONDS = Histogram(
    "pagoda_scheduler_queue_seconds",
    "From a request's arrival to its first admission",
    buckets=_QUEUE_BUCKETS,
)
ACCEPTED = Counter("pagoda_scheduler_requests_accepted", "Requests queued")
REFUSED = Counter("pagoda_scheduler_requests_refused", "Requests refused, by cause", ["cause"])
FINISHED = Counter("pagoda_scheduler_sequences_finished", "Sequences ended, by reason", ["reason"])
SHARD_UP = Gauge("pagoda_scheduler_shard_up", "1 while the shards are configured and take steps")
SHARD_LOSSES = Counter("pagoda_scheduler_shard_losses", "Times that the shard was lost")

# Counters that are there from the start: else their first event would be no increase.
for _cause in (
    *("draining", "duplicate", "invalid", "key_limit", "model_changed", "never_fits"),
    *("queue_full", "starting", "unserved"),
):
    REFUSED.labels(_cause)
for _reason in ("stop", "length", "abort", "error"):
    FINISHED.labels(_reason)
# Looked up once: a step pays for what it observes.
_phases = {phase: PHASE_SECONDS.labels(phase) for phase in ("plan", "wire", "compute", "sample")}
_tokens = {kind: STEP_TOKENS.labels(kind) for kind in ("prefill", "decode")}
_NOTHING: Final = Scheduler(Limits(0, 1, 0, 0, 0, 0))


def observe_plan(plan: StepPlan, seconds: float) -> None:
    """Counts one planned step."""
    _phases["plan"].observe(seconds)
    _tokens["decode"].inc(plan.num_decode_tokens)
    _tokens["prefill"].inc(plan.num_tokens - plan.num_decode_tokens)
    for request in plan.admitted:
        # What came from a lost scheduler is as old as its first attempt.
        if not request.submit.prior_outputs:
            QUEUE_SECONDS.observe(time.monotonic() - request.arrival)


def observe_result(response: ExecuteResponse, seconds: float, alone_seconds: float) -> None:
    """Counts a result, `seconds` after its step was sent, `alone_seconds` of them after the one before."""
    STEP_SECONDS.observe(seconds)
    compute, sample = response.compute_seconds, response.sample_seconds
    _phases["compute"].observe(compute)
    _phases["sample"].observe(sample)
    _phases["wire"].observe(max(alone_seconds - compute - sample, 0.0))


def watch(engine: "Engine") -> None:
    """Reads the state of `engine` at each scrape."""
    _state.engine = engine


class _State(Collector):
    """Gauges of queues and pools, and counters that the scheduler keeps anyway; zeros before there is one.

    Scrapes come on another thread than steps, which go on meanwhile: so it takes copies, and figures may be a
    step apart.
    """

    def __init__(self) -> None:
        self.engine: Engine | None = None

    def collect(self) -> Iterable[Metric]:
        scheduler = (self.engine and self.engine.scheduler) or _NOTHING
        yield from _pools(scheduler)
        yield from _queues(scheduler)
        block_bytes = self.engine.block_bytes if self.engine else 0
        yield from _totals(scheduler, block_bytes)


def _pools(scheduler: Scheduler) -> Iterable[Metric]:
    blocks = scheduler.blocks
    pools = {"device": blocks.device, "host": blocks.host}
    states = GaugeMetricFamily("pagoda_kv_blocks", "KV blocks by state", labels=["tier", "state"])
    for tier, pool in pools.items():
        states.add_metric([tier, "used"], pool.num_used)
        states.add_metric([tier, "cached"], pool.num_cached)
        states.add_metric([tier, "free"], pool.num_free)
    yield states
    shared = {tier: pool.num_shared for tier, pool in pools.items()}
    yield _gauge("pagoda_kv_shared_blocks", "Used blocks that several tables hold", "tier", shared)
    utilisation = {tier: pool.num_used / (pool.num_blocks or 1) for tier, pool in pools.items()}
    yield _gauge("pagoda_kv_utilisation_ratio", "Used blocks over all", "tier", utilisation)
    partial = blocks.partial_blocks(scheduler.running)
    empty, slots = sum(partial.values()), blocks.device.num_used * blocks.block_size
    filled = {"filled": slots - empty, "empty": empty}
    yield _gauge("pagoda_kv_slots", "Token slots of used device blocks, shared ones once", "state", filled)
    yield GaugeMetricFamily(
        "pagoda_kv_waste_ratio", "Empty slots over all of used device blocks", empty / (slots or 1)
    )
    yield GaugeMetricFamily(
        "pagoda_kv_partial_blocks",
        "Used device blocks with empty slots, the only fragmentation there is",
        len(partial),
    )


def _queues(scheduler: Scheduler) -> Iterable[Metric]:
    waiting = tuple(scheduler.waiting)
    # The first admission looks for a prefix, and notes what it found.
    new = [sequence.request.arrival for sequence in waiting if sequence.cached_tokens is None]
    now = time.monotonic()
    for name, text, value in (
        ("running_sequences", "Sequences that hold a slot", len(scheduler.running)),
        ("max_running_sequences", "Sequences that can run at once", scheduler.limits.max_num_seqs),
        ("waiting_sequences", "Sequences that wait, paused ones included", len(waiting)),
        ("paused_sequences", "Of those, sequences that ran before", len(waiting) - len(new)),
        ("oldest_waiting_seconds", "Age of the oldest request that never ran", now - min(new, default=now)),
        ("outstanding_tokens", "Tokens still to compute, over all requests", scheduler.outstanding_tokens),
    ):
        yield GaugeMetricFamily(f"pagoda_scheduler_{name}", text, value)


def _totals(scheduler: Scheduler, block_bytes: int) -> Iterable[Metric]:
    totals = scheduler.totals
    for name, text, value in (
        ("pagoda_kv_block_copies", "Blocks copied on write", totals.copies),
        ("pagoda_kv_block_evictions", "Cached blocks given to others", totals.evictions),
        ("pagoda_prefix_cache_queried_tokens", "Tokens looked up at admission", totals.queried_tokens),
        ("pagoda_prefix_cache_hit_tokens", "Tokens found, which need no computing", totals.hit_tokens),
    ):
        yield CounterMetricFamily(name, text, value=value)
    swapped = {"out": totals.swapped_out, "in": totals.swapped_in}
    yield _counter("pagoda_kv_blocks_swapped", "Blocks swapped", "direction", swapped)
    swapped_bytes = {direction: blocks * block_bytes for direction, blocks in swapped.items()}
    yield _counter("pagoda_kv_swapped_bytes", "Bytes of them, over all ranks", "direction", swapped_bytes)
    modes = {"recompute": totals.recomputes, "swap": totals.swaps}
    yield _counter("pagoda_scheduler_preemptions", "Requests preempted", "mode", modes)


def _gauge(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=[label])
    for value, number in values.items():
        family.add_metric([value], number)
    return family


def _counter(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(name, text, labels=[label])
    for value, number in values.items():
        family.add_metric([value], number)
    return family


_state = _State()
REGISTRY.register(_state)
