"""What a scheduler process is told at start."""

from dataclasses import dataclass
from pathlib import Path

from common.config import option


@dataclass(frozen=True)
class SchedulerConfig:
    """Owns every block table of one replica and decides who runs."""

    shard_addresses: tuple[str, ...] = option("Shards of this replica by rank, HOST:PORT or unix:PATH")
    listen_address: str = option("Where routers connect, HOST:PORT or unix:PATH", default="127.0.0.1:50052")
    gateway_address: str | None = option(
        "Where an SMG gateway connects, HOST:PORT; by default nowhere", default=None
    )
    model: str | None = option(
        "Model folder, for a gateway alone: its tokenizer and eos ids are read", default=None
    )
    served_model_name: str | None = option(
        "Model name that a gateway is told; by default the folder's name", default=None
    )
    metrics_address: str = option("Where /metrics and the probes are served", default="127.0.0.1:9102")
    block_size: int = option(
        "Tokens in a block of K and V", default=16, unit="tokens", minimum=1, maximum=1024
    )
    num_gpu_blocks_override: int | None = option(
        "Blocks in the device pool; by default as many as fit in memory",
        default=None,
        unit="blocks",
        minimum=1,
        maximum=2**31 - 1,
    )
    max_model_len: int | None = option(
        "Prompt and output tokens of one request; by default what the model was made for",
        default=None,
        unit="tokens",
        minimum=2,
        maximum=2**24,
    )
    max_num_seqs: int | None = option(
        "Sequences that run at once; by default 64 on a CPU and 256 on a GPU",
        default=None,
        unit="sequences",
        minimum=1,
        maximum=65536,
    )
    max_num_batched_tokens: int | None = option(
        "Tokens of one step, at least max_num_seqs + block_size; by default 256 on a CPU and 4096 on a GPU",
        default=None,
        unit="tokens",
        minimum=2,
        maximum=2**20,
    )
    enable_prefix_caching: bool = option(
        "Let requests share KV blocks of equal prefixes, also after they ended", default=True
    )
    swap_space: float = option(
        "Host memory of each shard for blocks of preempted requests", default=0.0, unit="GiB", minimum=0
    )
    preemption_mode: str = option(
        "How preempted requests come back; auto recomputes one sequence and swaps several",
        default="auto",
        choices=("auto", "recompute", "swap"),
    )
    max_waiting_requests: int = option(
        "Requests that may wait; more are refused", default=1024, unit="requests", minimum=1
    )
    step_timeout: float = option(
        "A step that takes longer counts as a failure of the shard", default=120.0, unit="seconds", minimum=1
    )
    shutdown_grace: float = option(
        "How long running requests may go on after SIGTERM", default=30.0, unit="seconds", minimum=0
    )
    tls_cert_file: Path | None = option(
        "PEM certificate chain to show to routers; serves with TLS", default=None
    )
    tls_key_file: Path | None = option("Its PEM key, not encrypted", default=None)
    tls_client_ca_file: Path | None = option(
        "PEM certificates of the CA that routers must have a certificate of", default=None
    )
    shard_tls_ca_file: Path | None = option(
        "PEM certificates of the CA of the shards; connects with TLS", default=None
    )
    shard_tls_cert_file: Path | None = option("PEM certificate chain to show to the shards", default=None)
    shard_tls_key_file: Path | None = option("Its PEM key, not encrypted", default=None)
    shard_tls_server_name: str | None = option(
        "Name in the certificate of the shards, where it isn't the host of the address", default=None
    )
    insecure: bool = option(
        "Allow addresses beyond this machine without TLS and client certificates", default=False
    )
    log_level: str = option("Log level", default="info", choices=("debug", "info", "warning", "error"))
    log_format: str = option("How log lines look", default="text", choices=("text", "json"))
    otlp_endpoint: str | None = option(
        "OpenTelemetry collector that gets traces, http://HOST:PORT or https://HOST:PORT; by default none",
        default=None,
    )
    exit_with_parent: bool = option("Exit when standard input closes", default=False)
