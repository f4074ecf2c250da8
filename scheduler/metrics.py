"""What the scheduler measures. Gauges are read from the scheduler when scraped, so steps don't pay."""

from collections.abc import Callable

from prometheus_client import Counter, Gauge, Histogram

from scheduler.scheduler import Scheduler, StepPlan

_blocks = Gauge("pagoda_kv_blocks", "KV blocks by state", ["tier", "state"])
_running = Gauge("pagoda_scheduler_running_sequences", "Sequences that hold a slot")
_waiting = Gauge("pagoda_scheduler_waiting_sequences", "Sequences that wait, paused ones included")
_outstanding = Gauge("pagoda_scheduler_outstanding_tokens", "Tokens still to compute, over all requests")

PREEMPTIONS = Counter("pagoda_scheduler_preemptions_total", "Requests preempted", ["mode"])
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

    def read(value: Callable[[Scheduler], int]) -> Callable[[], float]:
        return lambda: value(scheduler) if (scheduler := current()) else 0

    _blocks.labels("device", "used").set_function(read(lambda s: s.pool.num_used))
    _blocks.labels("device", "free").set_function(read(lambda s: s.pool.num_free))
    _running.set_function(read(lambda s: len(s.running)))
    _waiting.set_function(read(lambda s: len(s.waiting)))
    _outstanding.set_function(read(lambda s: s.outstanding_tokens))


def observe_plan(plan: StepPlan, seconds: float) -> None:
    """Counts one planned step."""
    PLAN_SECONDS.observe(seconds)
    STEP_TOKENS.labels("decode").inc(plan.num_decode_tokens)
    STEP_TOKENS.labels("prefill").inc(plan.num_tokens - plan.num_decode_tokens)
