"""What the scheduler measures. Gauges are read from the scheduler when scraped, so steps don't pay."""

from collections.abc import Callable, Iterable

from prometheus_client import REGISTRY, Counter, Gauge, Histogram, Metric
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from scheduler.block_pool import BlockPool
from scheduler.scheduler import Scheduler
from scheduler.step_plan import StepPlan
from scheduler.totals import Totals

_blocks = Gauge("pagoda_kv_blocks", "KV blocks by state", ["tier", "state"])
_shared = Gauge("pagoda_kv_shared_blocks", "Device blocks that several tables hold")
_running = Gauge("pagoda_scheduler_running_sequences", "Sequences that hold a slot")
_waiting = Gauge("pagoda_scheduler_waiting_sequences", "Sequences that wait, paused ones included")
_outstanding = Gauge("pagoda_scheduler_outstanding_tokens", "Tokens still to compute, over all requests")

STEP_TOKENS = Counter("pagoda_scheduler_step_tokens_total", "Tokens computed, by kind", ["kind"])
STEP_SECONDS = Histogram(
    "pagoda_scheduler_step_seconds",
    "From sending a step to its result, overlap included",
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
)
PLAN_SECONDS = Histogram(
    "pagoda_scheduler_plan_seconds",
    "Planning one step",
    buckets=(0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1),
)
FINISHED = Counter("pagoda_scheduler_sequences_finished_total", "Sequences ended, by reason", ["reason"])
REFUSED = Counter("pagoda_scheduler_requests_refused_total", "Requests refused, by status code", ["code"])
SHARD_LOSSES = Counter("pagoda_scheduler_shard_losses_total", "Times that the shard was lost")


def watch(current: Callable[[], Scheduler | None]) -> None:
    """Reads the gauges from `current()` at each scrape; zero before there is a scheduler."""

    def read(value: Callable[[Scheduler], float]) -> Callable[[], float]:
        return lambda: value(scheduler) if (scheduler := current()) else 0

    def watch_pool(tier: str, pool: Callable[[Scheduler], BlockPool]) -> None:
        _blocks.labels(tier, "used").set_function(read(lambda s: pool(s).num_used))
        _blocks.labels(tier, "cached").set_function(read(lambda s: pool(s).num_cached))
        _blocks.labels(tier, "free").set_function(read(lambda s: pool(s).num_free))

    watch_pool("device", lambda s: s.blocks.device)
    watch_pool("host", lambda s: s.blocks.host)
    _shared.set_function(read(lambda s: s.blocks.device.num_shared))
    _running.set_function(read(lambda s: len(s.running)))
    _waiting.set_function(read(lambda s: len(s.waiting)))
    _outstanding.set_function(read(lambda s: s.outstanding_tokens))
    _totals.current = current


class _Totals(Collector):
    """Counters that the scheduler keeps anyway; zero before there is one."""

    def __init__(self) -> None:
        self.current: Callable[[], Scheduler | None] = lambda: None

    def collect(self) -> Iterable[Metric]:
        scheduler = self.current()
        totals = scheduler.totals if scheduler else Totals()
        for name, text, value in (
            ("pagoda_kv_block_copies", "Blocks copied on write", totals.copies),
            ("pagoda_kv_block_evictions", "Cached blocks given to others", totals.evictions),
            ("pagoda_prefix_cache_queried_tokens", "Tokens looked up at admission", totals.queried_tokens),
            ("pagoda_prefix_cache_hit_tokens", "Tokens found, which need no computing", totals.hit_tokens),
        ):
            yield CounterMetricFamily(name, text, value=value)
        swapped = CounterMetricFamily("pagoda_kv_blocks_swapped", "Blocks swapped", labels=["direction"])
        swapped.add_metric(["out"], totals.swapped_out)
        swapped.add_metric(["in"], totals.swapped_in)
        yield swapped
        preemptions = CounterMetricFamily(
            "pagoda_scheduler_preemptions", "Requests preempted", labels=["mode"]
        )
        preemptions.add_metric(["recompute"], totals.recomputes)
        preemptions.add_metric(["swap"], totals.swaps)
        yield preemptions


_totals = _Totals()
REGISTRY.register(_totals)


def observe_plan(plan: StepPlan, seconds: float) -> None:
    """Counts one planned step."""
    PLAN_SECONDS.observe(seconds)
    STEP_TOKENS.labels("decode").inc(plan.num_decode_tokens)
    STEP_TOKENS.labels("prefill").inc(plan.num_tokens - plan.num_decode_tokens)
