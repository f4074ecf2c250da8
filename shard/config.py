"""What a shard process is told at start."""

from dataclasses import dataclass
from pathlib import Path

from common.config import option


@dataclass(frozen=True)
class ShardConfig:
    """Holds the weights and the KV tensor, and executes steps."""

    model: Path = option("Hugging Face folder (safetensors) or a GGUF file")
    listen_address: str = option(
        "Where the scheduler connects, HOST:PORT or unix:PATH", default="127.0.0.1:50053"
    )
    metrics_address: str = option("Where /metrics and the probes are served", default="127.0.0.1:9103")
    dtype: str = option(
        "Type of weights, K and V; auto is what the checkpoint says",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    device: str = option(
        "Where to compute; auto takes a GPU if there is one", default="auto", choices=("auto", "cpu", "cuda")
    )
    kv_cache_memory_bytes: int | None = option(
        "Memory for KV blocks; by default on a CPU a quarter of the memory, at most 4 GiB, and on a GPU what "
        "gpu_memory_utilization leaves",
        default=None,
        unit="bytes",
        minimum=1,
        maximum=2**46,
    )
    gpu_memory_utilization: float = option(
        "Share of a GPU's memory for weights, workspace and KV blocks together",
        default=0.9,
        minimum=0.05,
        maximum=1.0,
    )
    tensor_parallel_size: int = option(
        "Ranks that share the model, each a shard process of its own",
        default=1,
        unit="ranks",
        minimum=1,
        maximum=1024,
    )
    rank: int = option("Which of them this is; rank 0 samples", default=0, minimum=0, maximum=1023)
    rendezvous_host: str = option(
        "Of several ranks: the IPv4 address of this machine at which the others reach it", default="127.0.0.1"
    )
    collective_timeout: float = option(
        "How long a rank waits for the others within a step; then the step fails",
        default=30.0,
        unit="seconds",
        minimum=1,
        maximum=3600,
    )
    enforce_eager: bool = option(
        "Launch the kernels of decode steps one by one, instead of replaying CUDA graphs", default=False
    )
    shutdown_grace: float = option(
        "How long to stay for the scheduler after SIGTERM", default=60.0, unit="seconds", minimum=0
    )
    tls_cert_file: Path | None = option(
        "PEM certificate chain to show to the scheduler; serves with TLS", default=None
    )
    tls_key_file: Path | None = option("Its PEM key, not encrypted", default=None)
    tls_client_ca_file: Path | None = option(
        "PEM certificates of the CA that the scheduler must have a certificate of", default=None
    )
    insecure: bool = option(
        "Allow an address beyond this machine without TLS and client certificates", default=False
    )
    log_level: str = option("Log level", default="info", choices=("debug", "info", "warning", "error"))
    log_format: str = option("How log lines look", default="text", choices=("text", "json"))
    exit_with_parent: bool = option("Exit when standard input closes", default=False)
