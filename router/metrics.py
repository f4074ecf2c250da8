"""What /metrics says of a router. Label values are bounded, those of tenants too."""

from itertools import product
from typing import Final

from prometheus_client import Counter, Gauge, Histogram

from pagoda.v1.inference_pb2 import Usage

# As many tenants have figures of their own, those who come first; all further ones are one.
MAX_TENANTS: Final = 100

_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)

REQUESTS: Final = Counter("pagoda_router_requests", "Calls by method and gRPC code", ["method", "code"])
ERRORS: Final = Counter(
    "pagoda_router_errors", "Calls that failed, by the reason that clients get", ["reason"]
)
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
RETRIES: Final = Counter("pagoda_router_retries", "Requests tried on another scheduler after a refusal")
RESUBMITS: Final = Counter("pagoda_router_resubmits", "Requests submitted anew after a lost scheduler")
REPLICAS: Final = Gauge(
    "pagoda_router_replicas",
    "Schedulers: known by --scheduler-addresses or DNS, up with a stream, available for new requests",
    ["state"],
)
SCHEDULER_UP: Final = Gauge("pagoda_router_scheduler_up", "1 while its stream is up", ["scheduler"])
TENANT_REQUESTS: Final = Counter(
    "pagoda_router_tenant_requests", "Requests that ended, by API key", ["tenant"]
)
TENANT_TOKENS: Final = Counter(
    "pagoda_router_tenant_tokens", "Tokens of requests that ended, by API key", ["tenant", "kind"]
)

# What alerts count as no fault of a client's.
FAULTS: Final = ("INTERNAL", "UNAVAILABLE", "UNKNOWN")
# There from the start: of a counter that its first event makes, no increase is seen.
GENERATING: Final = ("Generate", "GenerateStream", "/v1/completions", "/v1/chat/completions")
for _method, _code in product(GENERATING, ("OK", "RESOURCE_EXHAUSTED", *FAULTS)):
    REQUESTS.labels(_method, _code)

_tenants: set[str] = set()


def count_call(method: str, code: str, seconds: float) -> None:
    """Counts a call that ended."""
    REQUESTS.labels(method, code).inc()
    REQUEST_DURATION.labels(method).observe(seconds)


def count_tenant(tenant_id: str, usage: Usage) -> None:
    """Counts a request that ended. `tenant_id` is empty where no keys are asked for."""
    tenant = _tenant_label(tenant_id)
    TENANT_REQUESTS.labels(tenant).inc()
    TENANT_TOKENS.labels(tenant, "prompt").inc(usage.prompt_tokens)
    TENANT_TOKENS.labels(tenant, "output").inc(usage.completion_tokens)


def _tenant_label(tenant_id: str) -> str:
    if not tenant_id:
        return "none"
    if tenant_id not in _tenants:
        if len(_tenants) >= MAX_TENANTS:
            return "other"
        _tenants.add(tenant_id)
    return tenant_id
