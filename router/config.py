"""What a router process is told at start."""

from dataclasses import dataclass
from pathlib import Path

from common.config import option
from router.tool_calls import FORMATS


@dataclass(frozen=True)
class RouterConfig:
    """Takes requests as text, hands them to schedulers as tokens, and streams text back."""

    model: str = option("Hugging Face model folder; only its tokenizer, chat template and eos ids are read")
    scheduler_addresses: tuple[str, ...] = option(
        "One scheduler per replica, HOST:PORT or unix:PATH; dns:HOST:PORT is one per address of the name"
    )
    served_model_name: str | None = option(
        "Model name that clients give; by default the folder's name", default=None
    )
    listen_address: str = option("Where clients connect, HOST:PORT or unix:PATH", default="127.0.0.1:50051")
    http_address: str = option(
        "Where the OpenAI-compatible API and chat page are, HOST:PORT; empty: nowhere",
        default="127.0.0.1:8000",
    )
    metrics_address: str = option("Where /metrics and the probes are served", default="127.0.0.1:9101")
    block_map_address: str | None = option(
        "Where the block map is served as a web page, HOST:PORT; by default nowhere", default=None
    )
    max_prompt_bytes: int = option(
        "UTF-8 bytes of one prompt, before and after the chat template",
        default=1024 * 1024,
        unit="bytes",
        minimum=1,
        maximum=16 * 1024 * 1024,
    )
    max_concurrent_requests: int = option(
        "Requests that may run at once; more are refused",
        default=1024,
        unit="requests",
        minimum=1,
        maximum=65536,
    )
    tool_call_parser: str = option(
        "How the model writes tool calls; auto goes by its chat template",
        default="auto",
        choices=("auto", *FORMATS),
    )
    max_connection_age: float = option(
        "When clients are told to connect anew, so that new routers get some; running calls end in peace",
        default=300.0,
        unit="seconds",
        minimum=1,
        maximum=86400,
    )
    request_timeout: float = option(
        "How long a request over HTTP, which has no deadline of its own, may take",
        default=600.0,
        unit="seconds",
        minimum=0.1,
        maximum=86400,
    )
    write_stall_timeout: float = option(
        "A client that takes nothing for so long is ended",
        default=60.0,
        unit="seconds",
        minimum=0.1,
        maximum=3600,
    )
    reconnect_timeout: float = option(
        "How long a running request waits for a lost scheduler or another one",
        default=60.0,
        unit="seconds",
        minimum=0,
        maximum=3600,
    )
    shutdown_grace: float = option(
        "How long running requests may go on after SIGTERM", default=30.0, unit="seconds", minimum=0
    )
    drain_delay: float = option(
        "How long new requests are still taken after SIGTERM, while endpoints propagate",
        default=0.0,
        unit="seconds",
        minimum=0,
    )
    tls_cert_file: Path | None = option(
        "PEM certificate chain to show to clients; serves with TLS", default=None
    )
    tls_key_file: Path | None = option("Its PEM key, not encrypted", default=None)
    tls_client_ca_file: Path | None = option(
        "PEM certificates of the CA that clients must have a certificate of", default=None
    )
    scheduler_tls_ca_file: Path | None = option(
        "PEM certificates of the CA of the schedulers; connects with TLS", default=None
    )
    scheduler_tls_cert_file: Path | None = option(
        "PEM certificate chain to show to the schedulers", default=None
    )
    scheduler_tls_key_file: Path | None = option("Its PEM key, not encrypted", default=None)
    scheduler_tls_server_name: str | None = option(
        "Name in the certificate of the schedulers, where it isn't the host of the address", default=None
    )
    api_keys_file: Path | None = option(
        "YAML list of API keys, of which each call must carry one; by default none is asked for", default=None
    )
    insecure: bool = option(
        "Allow addresses beyond this machine without TLS, or without API keys and client certificates",
        default=False,
    )
    log_level: str = option("Log level", default="info", choices=("debug", "info", "warning", "error"))
    log_requests: str = option(
        "Log each request that ends: summary is counts and times; text also has prompt and outputs, cut",
        default="off",
        choices=("off", "summary", "text"),
    )
    log_format: str = option("How log lines look", default="text", choices=("text", "json"))
    otlp_endpoint: str | None = option(
        "OpenTelemetry collector that gets traces, http://HOST:PORT or https://HOST:PORT; by default none",
        default=None,
    )
    trace_sample_ratio: float = option(
        "Share of requests to trace, of those whose client didn't decide", default=0.0, minimum=0, maximum=1
    )
    exit_with_parent: bool = option("Exit when standard input closes", default=False)
