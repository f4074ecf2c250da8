"""How the launcher starts each process: its command line and its environment."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from launcher.config import ServeConfig

LOCAL_RANKS = 1
# After its own grace, a process gets this long to close up.
CLOSING_S = 5.0

# Options that go to a process as they are; None leaves them to its environment, YAML section or default.
SHARED_OPTIONS = ("log_format",)
ROUTER_OPTIONS = (
    "api_keys_file",
    "insecure",
    "log_requests",
    "otlp_endpoint",
    "tls_cert_file",
    "tls_client_ca_file",
    "tls_key_file",
    "tool_call_parser",
    "trace_sample_ratio",
)
SHARD_OPTIONS = ("dtype", "device", "kv_cache_memory_bytes", "enforce_eager")
SCHEDULER_OPTIONS = (
    "block_size",
    "enable_prefix_caching",
    "insecure",
    "max_model_len",
    "max_num_batched_tokens",
    "max_num_seqs",
    "max_waiting_requests",
    "num_gpu_blocks_override",
    "otlp_endpoint",
    "preemption_mode",
    "swap_space",
)


@dataclass(frozen=True)
class ChildSpec:
    """One process: `argv` and the whole `environ` it starts with, and how long it may take to stop."""

    name: str
    argv: tuple[str, ...]
    environ: Mapping[str, str]
    stop_within_s: float


def child_specs(
    config: ServeConfig,
    addresses: Mapping[str, str],
    model: Path,
    folder: Path,
    served_model_name: str,
    sockets: Path,
    config_file: str | None,
) -> list[ChildSpec]:
    """The three processes, in the order in which they are to be stopped.

    `model` is what to serve: `folder` itself, or the GGUF file that it was made from. `addresses` holds the
    addresses by option name, with real ports; those of HTTP, the block map and for a gateway if they are
    wanted.
    """
    scheduler, shard = f"unix:{sockets}/scheduler", f"unix:{sockets}/shard-0"
    own: dict[str, dict[str, object]] = {
        "router": {
            "model": folder,
            "served-model-name": served_model_name,
            "scheduler-addresses": scheduler,
            "listen-address": addresses["listen-address"],
            "http-address": addresses.get("http-address", ""),
            "shutdown-grace": config.shutdown_grace,
            **_given(config, ROUTER_OPTIONS),
            **{name: value for name, value in addresses.items() if name == "block-map-address"},
        },
        "scheduler": {
            "shard-addresses": shard,
            "listen-address": scheduler,
            "shutdown-grace": config.shutdown_grace,
            **_given(config, SCHEDULER_OPTIONS),
            **_for_gateway(addresses, folder, served_model_name),
        },
        "shard": {"model": model, "listen-address": shard, **_given(config, SHARD_OPTIONS)},
    }
    shared: dict[str, object] = {"log-level": config.log_level, **_given(config, SHARED_OPTIONS)}
    if config_file is not None:
        shared["config"] = Path(config_file).resolve()
    specs = []
    for name, options in own.items():
        options = {**options, **shared, "metrics-address": addresses[f"{name}-metrics-address"]}
        flags = [word for option, value in options.items() for word in _flag(option, value)]
        specs.append(
            ChildSpec(
                name,
                (sys.executable, "-m", name, *flags, "--exit-with-parent"),
                _environ(name),
                # Shards have nothing of their own to finish once the scheduler is gone.
                CLOSING_S if name == "shard" else config.shutdown_grace + CLOSING_S,
            )
        )
    return specs


def _for_gateway(addresses: Mapping[str, str], folder: Path, served_model_name: str) -> dict[str, object]:
    if "gateway-address" not in addresses:
        return {}
    return {
        "gateway-address": addresses["gateway-address"],
        "model": folder,
        "served-model-name": served_model_name,
    }


def _flag(option: str, value: object) -> tuple[str, ...]:
    if isinstance(value, bool):
        return (f"--{option}" if value else f"--no-{option}",)
    return (f"--{option}", str(value))


def _given(config: ServeConfig, options: tuple[str, ...]) -> dict[str, object]:
    values = {name.replace("_", "-"): getattr(config, name) for name in options}
    # Paths are the user's, and the processes start in another folder.
    return {
        name: value.expanduser().resolve() if isinstance(value, Path) else value
        for name, value in values.items()
        if value is not None
    }


def _environ(name: str) -> dict[str, str]:
    environ = dict(os.environ)
    if name == "shard":
        # Before exec, or OpenMP has already made its pool. Ranks that share cores slow each other manyfold.
        environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // LOCAL_RANKS)))
        # Enough between the phases of a layer; more would take the cores from router and scheduler.
        environ.setdefault("GOMP_SPINCOUNT", "10000")
    return environ


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
