"""What the shard measures."""

from prometheus_client import Counter, Gauge, Histogram

LOAD_RATIO = Gauge("pagoda_shard_load_ratio", "Share of the weights that is loaded, 0 to 1")
WARM_UP_RATIO = Gauge("pagoda_shard_warm_up_ratio", "Share of the warm-up that is done, 0 to 1")
KV_BYTES = Gauge("pagoda_shard_kv_cache_bytes", "Size of the KV tensor")
EPOCH = Gauge("pagoda_shard_epoch", "The epoch that the shard serves")
TOKENS = Counter("pagoda_shard_tokens_total", "Tokens computed")
FAILURES = Counter("pagoda_shard_step_failures_total", "Steps that failed")
STEP_SECONDS = Histogram(
    "pagoda_shard_step_seconds",
    "One step, by phase",
    ["phase"],
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
)
