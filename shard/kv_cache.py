"""The KV tensor in blocks, and how much memory there is for it."""

import os
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from kernels import AttentionBatch, KVCache
from shard import decode_graphs
from shard.model_config import ModelConfig, ModelError
from shard.models import DecoderModel

GIB: Final = 1 << 30
# A step of this many tokens is profiled to learn how much workspace a GPU needs beside the blocks.
PROFILED_TOKENS: Final = 4096
PROFILED_ROWS: Final = 256
PROFILED_BLOCK_SIZE: Final = 16
# What a CUDA graph takes besides its tensors: the arguments of some hundred launches. An estimate.
GRAPH_BYTES: Final = 4 << 20


def bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """K and V of one token in all layers."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize


def allocate(
    config: ModelConfig,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    pinned: bool = False,
) -> list[KVCache]:
    """Per layer K and V, each `[num_blocks, block_size, num_kv_heads, head_dim]`, not initialised.

    `pinned` host memory is what a GPU copies to and from without a detour.
    """
    shape = (num_blocks, block_size, config.num_kv_heads, config.head_dim)

    def tensor() -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device, pin_memory=pinned)

    return [(tensor(), tensor()) for _ in range(config.num_layers)]


def capacity_bytes(
    model: DecoderModel, device: torch.device, wanted: int | None, utilization: float, graphs: bool = False
) -> int:
    """Memory for blocks, in bytes: `wanted` if given, else what the device has to spare.

    `graphs`: whether some of it is to be left for `DecodeGraphs`.

    Raises:
        ModelError: there is less memory than `wanted`.
    """
    if wanted is not None:
        memory = _host_memory() if device.type == "cpu" else torch.cuda.mem_get_info(device)[1]
        if wanted > memory:
            raise ModelError(f"--kv-cache-memory-bytes {wanted} is above the {memory} bytes that there are")
        return wanted
    if device.type == "cpu":
        return min(_host_memory() // 4, 4 * GIB)
    left_for_graphs = _profile_decodes(model, device) if graphs else 0
    _profile_prefill(model, device)
    free, total = torch.cuda.mem_get_info(device)
    reusable = torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)
    return max(int(total * utilization) - (total - free) + reusable - left_for_graphs, 0)


def _host_memory() -> int:
    """Memory of this machine, or of this container where it has less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else "max"
    return min(total, int(text)) if text.isdigit() else total


@torch.inference_mode()
def _profile_prefill(model: DecoderModel, device: torch.device) -> None:
    """Runs one large step, so that the allocator's peak holds the workspace that steps need."""
    config = model.config
    tokens = min(PROFILED_TOKENS, config.max_position_embeddings)
    blocks = -(-tokens // PROFILED_BLOCK_SIZE)
    caches = allocate(config, blocks, PROFILED_BLOCK_SIZE, model.embedding.dtype, device)
    table = torch.arange(blocks, dtype=torch.int32, device=device).unsqueeze(0)
    batch = AttentionBatch.build(table, [tokens], [tokens], PROFILED_BLOCK_SIZE)
    hidden = model.forward(torch.zeros(tokens, dtype=torch.int64, device=device), batch, caches)
    model.compute_logits(hidden[:PROFILED_ROWS]).softmax(-1).cumsum(-1)
    torch.cuda.synchronize(device)
    del caches


@torch.inference_mode()
def _profile_decodes(model: DecoderModel, device: torch.device) -> int:
    """Bytes that graphs of decode steps take: they share the workspace of the largest, and its logits."""
    sizes = decode_graphs.batch_sizes(decode_graphs.MAX_SEQS)
    rows = sizes[-1]
    caches = allocate(model.config, 1, PROFILED_BLOCK_SIZE, model.embedding.dtype, device)
    padding = torch.zeros(rows, dtype=torch.int64, device=device)
    tables = torch.zeros(rows, 1, dtype=torch.int32, device=device)
    held = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    lengths = [decode_graphs.UNBOUNDED] * rows
    batch = AttentionBatch.of_decodes(tables, padding, PROFILED_BLOCK_SIZE, lengths)
    logits = model.compute_logits(model.forward(padding, batch, caches))
    workspace = torch.cuda.max_memory_allocated(device) - held
    torch.cuda.reset_peak_memory_stats(device)
    return workspace + logits.nbytes + len(sizes) * GRAPH_BYTES
