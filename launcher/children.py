"""How the launcher starts each process: its command line and its environment."""

import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from launcher.config import ServeConfig

# After its own grace, a process gets this long to close up.
CLOSING_S = 5.0

OTHERS = ("router", "scheduler")
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
    """One process: `argv` and the whole `environ` it starts with, and how long it may take to stop.

    `metrics_address` is where it says of itself how it does. What isn't `essential` has no liveness probe,
    and the others go on without it.
    """

    name: str
    metrics_address: str
    argv: tuple[str, ...]
    environ: Mapping[str, str]
    stop_within_s: float
    essential: bool = True


def child_specs(
    config: ServeConfig,
    addresses: Mapping[str, str],
    model: Path,
    folder: Path,
    served_model_name: str,
    sockets: Path,
    config_file: str | None,
) -> list[ChildSpec]:
    """All processes, in the order in which they are to be stopped.

    `model` is what to serve: `folder` itself, or the GGUF file that it was made from. `addresses` holds the
    addresses by option name, with real ports; those of HTTP, the block map and for a gateway if they are
    wanted, and the metrics' of ranks by `metrics_option`.
    """
    ranks = config.tensor_parallel_size
    scheduler = f"unix:{sockets}/scheduler"
    shards = [f"unix:{sockets}/shard-{rank}" for rank in range(ranks)]
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
            "shard-addresses": ",".join(shards),
            "listen-address": scheduler,
            "shutdown-grace": config.shutdown_grace,
            **_given(config, SCHEDULER_OPTIONS),
            **_for_gateway(addresses, folder, served_model_name),
        },
    }
    for rank, (name, address) in enumerate(zip(shard_names(ranks), shards, strict=True)):
        own[name] = {"model": model, "listen-address": address, **_given(config, SHARD_OPTIONS)}
        if ranks > 1:
            own[name] |= {"tensor-parallel-size": ranks, "rank": rank}
    shared: dict[str, object] = {"log-level": config.log_level, **_given(config, SHARED_OPTIONS)}
    if config_file is not None:
        shared["config"] = Path(config_file).resolve()
    specs = []
    for name, options in own.items():
        metrics = addresses[metrics_option(name)]
        options = {**options, **shared, "metrics-address": metrics}
        flags = [word for option, value in options.items() for word in _flag(option, value)]
        module = name.partition("-")[0]
        specs.append(
            ChildSpec(
                name,
                metrics,
                (sys.executable, "-m", module, *flags, "--exit-with-parent"),
                shard_environ(ranks) if module == "shard" else dict(os.environ),
                # Shards have nothing of their own to finish once the scheduler is gone.
                CLOSING_S if module == "shard" else config.shutdown_grace + CLOSING_S,
            )
        )
    return specs


def shard_names(ranks: int) -> list[str]:
    """What the shard processes are called."""
    return ["shard"] if ranks == 1 else [f"shard-{rank}" for rank in range(ranks)]


def metrics_option(name: str) -> str:
    """The option that a process's metrics address comes from."""
    module, _, rank = name.partition("-")
    return f"{module}-metrics-address" + (f" of rank {rank}" if rank else "")


def metrics_addresses(config: ServeConfig) -> dict[str, str]:
    """Where each process is to serve its metrics, by option."""
    wanted = {metrics_option(name): getattr(config, f"{name}_metrics_address") for name in OTHERS}
    host, _, port = config.shard_metrics_address.rpartition(":")
    for rank, name in enumerate(shard_names(config.tensor_parallel_size)):
        # What isn't a port is said of the first one.
        free = not port.isdigit() or port == "0" or not rank
        wanted[metrics_option(name)] = f"{host}:{port}" if free else f"{host}:{int(port) + rank}"
    return wanted


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


def shard_environ(local_ranks: int) -> dict[str, str]:
    """What a shard starts with that shares this machine with others of its group."""
    environ = dict(os.environ)
    # Before exec, or OpenMP has already made its pool. Ranks that share cores slow each other manyfold.
    environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // local_ranks)))
    # Enough between the phases of a layer; more would take the cores from router and scheduler.
    environ.setdefault("GOMP_SPINCOUNT", "10000")
    return environ


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores that this process may run on, and use up: a container's limit counts, a part as a whole."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else min(cores, math.ceil(int(quota) / int(period)))
