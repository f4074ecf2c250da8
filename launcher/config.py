"""What the launcher's two commands are told. An option left out is left to the process that it is for."""

from dataclasses import dataclass
from pathlib import Path

from common.config import option

LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True)
class ServeConfig:
    """Serves a model on this machine: starts and supervises router, scheduler and shard."""

    model: str | None = option(
        "Model folder or .gguf file; by default the embedded SmolLM2-135M-Instruct", default=None
    )
    served_model_name: str | None = option(
        "Name that clients see; by default the folder's or file's", default=None
    )
    listen_address: str = option(
        "Where clients connect, HOST:PORT; port 0: a free one", default="127.0.0.1:50051"
    )
    http_address: str = option(
        "Where the OpenAI-compatible API and chat page are, HOST:PORT; port 0: a free one; empty: nowhere",
        default="127.0.0.1:8000",
    )
    router_metrics_address: str = option("Router's /metrics and probes, HOST:PORT", default="127.0.0.1:9101")
    scheduler_metrics_address: str = option(
        "Scheduler's /metrics and probes, HOST:PORT", default="127.0.0.1:9102"
    )
    shard_metrics_address: str = option(
        "Shard's /metrics and probes, HOST:PORT; those of further ranks are at the next ports",
        default="127.0.0.1:9103",
    )
    block_map_address: str | None = option(
        "Where the block map is served as a web page, HOST:PORT; by default nowhere", default=None
    )
    gateway_address: str | None = option(
        "Where an SMG gateway connects to the scheduler, HOST:PORT; by default nowhere", default=None
    )
    prometheus_address: str | None = option(
        "Where a Prometheus with the rules of k8s/rules is served, HOST:PORT; by default none is started",
        default=None,
    )
    grafana_address: str | None = option(
        "Where a Grafana with the dashboards of k8s/dashboards is served; needs --prometheus-address",
        default=None,
    )
    dtype: str | None = option(
        "Weights and computation", default=None, choices=("auto", "float32", "bfloat16", "float16")
    )
    device: str | None = option("Where the model runs", default=None, choices=("auto", "cpu", "cuda"))
    max_model_len: int | None = option(
        "Prompt and output tokens of one request, at most",
        default=None,
        unit="tokens",
        minimum=2,
        maximum=2**24,
    )
    max_num_seqs: int | None = option(
        "Sequences that run at once", default=None, unit="sequences", minimum=1, maximum=65536
    )
    max_num_batched_tokens: int | None = option(
        "Tokens of one step", default=None, unit="tokens", minimum=2, maximum=2**20
    )
    tensor_parallel_size: int = option(
        "Shard processes that share the model, each with some of its heads",
        default=1,
        unit="ranks",
        minimum=1,
        maximum=64,
    )
    block_size: int | None = option("Tokens in a block of K and V", default=None, unit="tokens", minimum=1)
    num_gpu_blocks_override: int | None = option(
        "Blocks in the device pool, instead of as many as fit in memory",
        default=None,
        unit="blocks",
        minimum=1,
        maximum=2**31 - 1,
    )
    kv_cache_memory_bytes: int | None = option(
        "Memory for K and V, instead of what is free", default=None, unit="bytes", minimum=1, maximum=2**46
    )
    enforce_eager: bool | None = option("Decode without CUDA graphs", default=None)
    enable_prefix_caching: bool | None = option("Share KV blocks of equal prefixes", default=None)
    swap_space: float | None = option(
        "Host memory for blocks of preempted requests", default=None, unit="GiB", minimum=0
    )
    preemption_mode: str | None = option(
        "How preempted requests come back", default=None, choices=("auto", "recompute", "swap")
    )
    max_waiting_requests: int | None = option(
        "Requests that may wait; more are refused", default=None, unit="requests", minimum=1
    )
    tool_call_parser: str | None = option(
        "How the model writes tool calls",
        default=None,
        choices=("auto", "hermes", "llama3_json", "mistral"),
    )
    tls_cert_file: Path | None = option(
        "PEM certificate chain to show to clients; serves with TLS", default=None
    )
    tls_key_file: Path | None = option("Its PEM key, not encrypted", default=None)
    tls_client_ca_file: Path | None = option(
        "PEM certificates of the CA that clients must have a certificate of", default=None
    )
    api_keys_file: Path | None = option(
        "YAML list of API keys, of which each call must carry one; by default none is asked for", default=None
    )
    insecure: bool | None = option(
        "Allow a listen address beyond this machine without TLS, or without API keys and client certificates",
        default=None,
    )
    shutdown_grace: float = option(
        "How long running requests may go on after Ctrl-C or SIGTERM", default=30.0, unit="seconds", minimum=0
    )
    log_level: str = option("Log level of the three processes", default="warning", choices=LOG_LEVELS)
    log_requests: str | None = option(
        "Log each request that ends: summary is counts and times; text also has prompt and outputs, cut",
        default=None,
        choices=("off", "summary", "text"),
    )
    log_format: str | None = option(
        "How log lines of the three processes look", default=None, choices=("text", "json")
    )
    otlp_endpoint: str | None = option(
        "OpenTelemetry collector that gets traces, http://HOST:PORT or https://HOST:PORT; by default none",
        default=None,
    )
    trace_sample_ratio: float | None = option(
        "Share of requests to trace, of those whose client didn't decide", default=None, minimum=0, maximum=1
    )
    exit_with_parent: bool = option("Exit when standard input closes", default=False)


@dataclass(frozen=True)
class ChatConfig:
    """Chats with a running server in this terminal."""

    address: str = option("The server, HOST:PORT", default="127.0.0.1:50051")
    prompt: str | None = option("Answer this and exit, instead of a conversation", default=None)
    system: str | None = option("System message that opens the conversation", default=None)
    max_tokens: int | None = option(
        "Tokens of one answer at most; by default what the context holds",
        default=None,
        unit="tokens",
        minimum=1,
    )
    temperature: float = option(
        "Randomness; 0 always takes the likeliest token", default=0.5, minimum=0, maximum=100
    )
    tls_ca_file: Path | None = option("PEM certificates of the server's CA; connects with TLS", default=None)
    tls_cert_file: Path | None = option("PEM certificate chain to show to the server", default=None)
    tls_key_file: Path | None = option("Its PEM key, not encrypted", default=None)
    api_key: str | None = option(
        "Key to call with; better in PAGODA_CHAT_API_KEY, as others on this machine see command lines",
        default=None,
    )
