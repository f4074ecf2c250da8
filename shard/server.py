"""One shard process: loads, serves, and stays until its scheduler lets go."""

import logging
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import FrameType

import grpc
import torch

import kernels
from common.config import ConfigError, load
from common.lifecycle import exit_with_parent, stop_signals
from common.logs import setup
from common.metrics import set_model
from common.paths import cache_root
from common.probes import Probes, serve_probes
from common.rpc import (
    SERVER_OPTIONS,
    AddressError,
    add_health,
    add_reflection,
    bind,
    check_listener,
    health_status,
)
from common.tls import server_tls
from common.version import PROTOCOL_VERSION
from pagoda.shard.v1 import shard_pb2_grpc
from pagoda.shard.v1.shard_pb2 import DescribeResponse
from shard import kv_cache, metrics
from shard.config import ShardConfig
from shard.constraints import Grammars
from shard.decode_graphs import CudaCapture
from shard.executor import StepExecutor
from shard.model_config import ModelError, load_model_config
from shard.parallel import WHOLE, Partition, RankGroup, Rendezvous, use_interface
from shard.rope import max_context_len
from shard.service import Loaded, ShardService
from shard.weights import load_model, model_revision

log = logging.getLogger(__name__)
SERVICE = "pagoda.shard.v1.ShardService"
# Loading and long steps hold the loop's tick back for as long as this.
STALL_LIMIT_S = 300.0


def load_shard(
    config: ShardConfig, service: ShardService, probes: Probes, stop_asked: threading.Event
) -> Loaded:
    """Reads the model and measures the memory for blocks.

    Raises:
        ModelError: the model can't be served; the message says why.
        SystemExit: asked to stop while loading.
    """

    def progress(done: int, total: int) -> None:
        if stop_asked.is_set():
            sys.exit(0)
        probes.tick()
        metrics.LOAD_RATIO.set(done / total)
        service.load_state = f"loading {done * 100 // total} %"

    path = config.model
    gguf = path if path.is_file() else None
    if gguf:
        from shard.gguf_import import cached_import

        path = cached_import(path, cache_root(), progress)
    model_config = load_model_config(path)
    device = _device(config.device, config.rank)
    partition = _partition(config)
    # A graph of several ranks would hold their collectives.
    graphs = device.type == "cuda" and not config.enforce_eager and partition == WHOLE
    dtype = getattr(torch, model_config.dtype if config.dtype == "auto" else config.dtype)
    longest = max_context_len(model_config)
    if kernels.cpu_kernels_missing(device):
        log.warning(
            "no CPU kernels are built, so this CPU computes about ten times slower than it could: "
            "install g++ and run `make kernels`"
        )
    started = time.monotonic()
    blocks = {}
    if gguf and kernels.keeps_blocks(dtype, device) and partition == WHOLE:
        from shard.gguf_import import block_matrices

        blocks = block_matrices(gguf)
    model = load_model(path, model_config, dtype, device, longest, progress, blocks, partition)
    revision = model_revision(path)
    ranks = None
    if partition != WHOLE:
        use_interface(config.rendezvous_host)
        identity = f"model {revision} as {dtype} on {partition.world_size} ranks"
        ranks = RankGroup(partition, device, config.collective_timeout, identity)
    model.prepare(ranks)
    log.info("loaded %s as %s on %s in %.1f s", path, dtype, device, time.monotonic() - started)
    description = DescribeResponse(
        protocol_version=PROTOCOL_VERSION,
        model_revision=revision,
        dtype=str(dtype).removeprefix("torch."),
        device=device.type,
        rank=partition.rank,
        world_size=partition.world_size,
        vocab_size=model_config.vocab_size,
        max_model_len=longest,
        kv_bytes_per_token=kv_cache.bytes_per_token(model.config, dtype),
        kv_capacity_bytes=kv_cache.capacity_bytes(
            model, device, config.kv_cache_memory_bytes, config.gpu_memory_utilization, graphs
        ),
    )
    set_model(revision, description.dtype)
    metrics.INFO.labels(device.type, str(partition.rank), str(partition.world_size)).set(1)
    if ranks and not ranks.rank:
        rendezvous = Rendezvous(config.rendezvous_host)
        description.rendezvous_address = rendezvous.address
    else:
        rendezvous = None
    start_capture = partial(CudaCapture, device) if graphs else None
    grammars = Grammars(path / "tokenizer.json", model_config.vocab_size)
    matched = None if ranks and ranks.rank else grammars
    executor = StepExecutor(model, dtype, device, start_capture, ranks, matched)
    return Loaded(executor, description, grammars, rendezvous)


def _partition(config: ShardConfig) -> Partition:
    if config.rank >= config.tensor_parallel_size:
        raise ModelError(
            f"--rank {config.rank} must be less than --tensor-parallel-size {config.tensor_parallel_size}"
        )
    return Partition(config.rank, config.tensor_parallel_size)


def _device(wanted: str, rank: int) -> torch.device:
    """Ranks of one machine have a GPU each, in their order."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ModelError("--device cuda: this torch sees no GPU; use --device cpu or auto")
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", rank % torch.cuda.device_count())


def serve(config: ShardConfig) -> None:
    """Serves until SIGTERM, SIGINT or SIGHUP, and then until the scheduler closes its stream or grace ends.

    A whole process group gets these signals at once; a shard that left first would take the tokens of
    requests that the scheduler is still draining.

    Raises:
        AddressError: an address is wrong or taken, or open to other machines without TLS.
        ConfigError: the files for TLS can't be used.
        ModelError: the model can't be served.
    """
    tls = server_tls(config.tls_cert_file, config.tls_key_file, config.tls_client_ca_file)
    check_listener(config.listen_address, tls, config.insecure)
    stop_asked = threading.Event()

    def ask(_signal: int, _frame: FrameType | None) -> None:
        stop_asked.set()

    for number in stop_signals():
        signal.signal(number, ask)

    probes = Probes(STALL_LIMIT_S)
    serve_probes(config.metrics_address, probes)
    service = ShardService()
    server = grpc.server(ThreadPoolExecutor(8, thread_name_prefix="grpc"), options=SERVER_OPTIONS)
    shard_pb2_grpc.add_ShardServiceServicer_to_server(service, server)
    health = add_health(server)
    add_reflection(server, [SERVICE])
    bind(server, config.listen_address, tls)
    _set_serving(health, False)
    server.start()

    service.loaded = load_shard(config, service, probes, stop_asked)
    probes.started = True
    deadline = None
    while deadline is None or (service.streaming and time.monotonic() < deadline):
        probes.tick()
        ready = service.configured.is_set() and deadline is None
        if ready != probes.ready:
            probes.ready = ready
            _set_serving(health, ready)
        if deadline is not None:
            time.sleep(0.05)
        elif stop_asked.wait(0.2):
            deadline = time.monotonic() + config.shutdown_grace
    server.stop(0)


def _set_serving(health: object, serving: bool) -> None:
    for name in ("", SERVICE):
        health.set(name, health_status(serving))  # type: ignore[attr-defined]


def main() -> None:
    """Runs `python -m shard`."""
    config = load(ShardConfig, "shard")
    setup("shard", config.log_level, config.log_format)
    if config.exit_with_parent:
        exit_with_parent()
    try:
        serve(config)
    except (AddressError, ConfigError, ModelError) as error:
        print(f"python -m shard: {error}", file=sys.stderr)
        sys.stderr.flush()
        # Past gRPC's and torch's threads, which a plain exit would wait for.
        os._exit(2)
    os._exit(0)
