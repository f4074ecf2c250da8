"""What the shard measures."""

from prometheus_client import Counter, Gauge, Histogram

INFO = Gauge("pagoda_shard_info", "Always 1; labels say which shard", ["device", "rank", "world_size"])
LOAD_RATIO = Gauge("pagoda_shard_load_ratio", "Share of the weights that is loaded, 0 to 1")
WARM_UP_RATIO = Gauge("pagoda_shard_warm_up_ratio", "Share of the warm-up that is done, 0 to 1")
KV_BYTES = Gauge("pagoda_shard_kv_cache_bytes", "Size of the KV tensor", ["tier"])
EPOCH = Gauge("pagoda_shard_epoch", "The epoch that the shard serves")
STREAMS = Gauge("pagoda_shard_streams", "Step streams that schedulers hold")
TOKENS = Counter("pagoda_shard_tokens", "Tokens computed")
FAILURES = Counter("pagoda_shard_step_failures", "Steps that failed")
STEP_SECONDS = Histogram(
    "pagoda_shard_step_seconds",
    "One step, by phase",
    ["phase"],
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
)
# Looked up once: each step pays for what it observes.
COMPUTE, SAMPLE = STEP_SECONDS.labels("compute"), STEP_SECONDS.labels("sample")
