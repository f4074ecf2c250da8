"""What one replica can hold and compute: of what its shards have and its operator wants."""

from dataclasses import dataclass
from typing import Final

from common.version import PROTOCOL_VERSION
from pagoda.shard.v1.shard_pb2 import DescribeResponse
from scheduler.config import SchedulerConfig

# Block ids are int32 in the shard's tables.
MAX_BLOCKS: Final = 2**31 - 1


class FatalError(Exception):
    """The scheduler can't go on as it is configured; the message is for the operator."""


@dataclass(frozen=True)
class Limits:
    """What one replica can hold and compute, and how it preempts."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    vocab_size: int
    num_host_blocks: int = 0
    # "auto": recompute a request of one sequence, swap one of several.
    preemption_mode: str = "auto"
    prefix_caching: bool = True

    @property
    def watermark(self) -> int:
        """Blocks that admission leaves available, so that running sequences can grow for a while: 1 %."""
        return self.num_blocks // 100


def resolve(config: SchedulerConfig, shard: DescribeResponse, known: Limits | None) -> Limits:
    """Of a shard that says this of itself; `known` are those that this process serves with already.

    Raises:
        FatalError: the shard and the configuration don't fit together.
    """
    if shard.protocol_version != PROTOCOL_VERSION:
        message = f"the shard speaks protocol {shard.protocol_version}, the scheduler {PROTOCOL_VERSION}"
        raise FatalError(f"{message}; run the same version of both")
    if shard.world_size > len(config.shard_addresses):
        raise FatalError(
            f"the shard is one of {shard.world_size} ranks; give all of them in --shard-addresses"
        )
    block_bytes = shard.kv_bytes_per_token * config.block_size
    if known and config.num_gpu_blocks_override is None:
        fits = known.num_blocks
    else:
        fits = min(shard.kv_capacity_bytes // block_bytes, MAX_BLOCKS)
    num_blocks = config.num_gpu_blocks_override or fits
    if not num_blocks:
        raise FatalError(
            f"no block fits: one takes {block_bytes} bytes and the "
            f"shard has {shard.kv_capacity_bytes} for them; give it a larger --kv-cache-memory-bytes"
        )
    if num_blocks > fits:
        raise FatalError(
            f"--num-gpu-blocks-override {num_blocks} is above the {fits} blocks that fit the shard's "
            f"{shard.kv_capacity_bytes} bytes for them"
        )
    max_model_len = config.max_model_len or shard.max_model_len
    if max_model_len < 2:
        raise FatalError("the model's context holds 1 token; prompt and output need 2 at least")
    if max_model_len > shard.max_model_len:
        raise FatalError(
            f"--max-model-len {max_model_len} is above the {shard.max_model_len} tokens of the model"
        )
    on_gpu = shard.device != "cpu"
    max_num_seqs = config.max_num_seqs or (256 if on_gpu else 64)
    budget = config.max_num_batched_tokens or max(4096 if on_gpu else 256, max_num_seqs + config.block_size)
    if budget < max_num_seqs + config.block_size:
        raise FatalError(
            f"--max-num-batched-tokens {budget} must be at least --max-num-seqs {max_num_seqs} "
            f"plus --block-size {config.block_size}"
        )
    return Limits(
        num_blocks,
        config.block_size,
        max_num_seqs,
        budget,
        max_model_len,
        shard.vocab_size,
        num_host_blocks=int(config.swap_space * (1 << 30)) // block_bytes,
        preemption_mode=config.preemption_mode,
        prefix_caching=config.enable_prefix_caching,
    )
