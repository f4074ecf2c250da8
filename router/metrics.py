"""What /metrics says of a router. Label values are bounded: methods, codes and configured addresses."""

from typing import Final

from prometheus_client import Counter, Gauge, Histogram

_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)

REQUESTS: Final = Counter("pagoda_router_requests", "Calls by method and gRPC code", ["method", "code"])
RUNNING: Final = Gauge("pagoda_router_running_requests", "Generations in progress")
PROMPT_TOKENS: Final = Counter("pagoda_router_prompt_tokens", "Prompt tokens of accepted requests")
OUTPUT_TOKENS: Final = Counter("pagoda_router_output_tokens", "Tokens received from schedulers")
TIME_TO_FIRST_TOKEN: Final = Histogram(
    "pagoda_router_time_to_first_token_seconds", "From request to its first token", buckets=_SECONDS
)
INTER_TOKEN_LATENCY: Final = Histogram(
    "pagoda_router_inter_token_latency_seconds", "Between tokens of one output, on arrival", buckets=_SECONDS
)
REQUEST_DURATION: Final = Histogram(
    "pagoda_router_request_duration_seconds", "From call to status", ["method"], buckets=_SECONDS
)
RECONNECTS: Final = Counter("pagoda_router_scheduler_reconnects", "Attempts to connect anew", ["scheduler"])
RESUBMITS: Final = Counter("pagoda_router_resubmits", "Requests submitted anew after a lost scheduler")
API_KEYS_STALE: Final = Gauge(
    "pagoda_router_api_keys_stale", "1 while the file of API keys is broken and those read before stay in use"
)
SCHEDULER_UP: Final = Gauge("pagoda_router_scheduler_up", "1 while its stream is up", ["scheduler"])
