"""Writing K and V into their slots, and moving whole blocks."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: N803

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.reference import FP8, check_scale
from kernels.triton.fp8 import narrow

_MOVED_WORDS = 1024


def write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """See `kernels.reference.write_kv`; a token whose slot is outside the cache is dropped.

    `key` and `value` may be strided, but for their last dimension.
    """
    check_scale(key_cache, key_scale)
    check_scale(value_cache, value_scale)
    if not (key_cache.is_contiguous() and value_cache.is_contiguous()):
        raise RuntimeError("the caches aren't contiguous: slots can't be numbered")
    key, value = _last_dense(key), _last_dense(value)
    num_tokens, num_heads, head_dim = key.shape
    if not key.numel():
        return
    quantised = key_cache.dtype == FP8
    if quantised:
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
    block_d = triton.next_power_of_2(head_dim)
    block_h = min(triton.next_power_of_2(num_heads), max(1, 2048 // block_d))
    _write_kv[(num_tokens, triton.cdiv(num_heads, block_h))](
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        key_cache.shape[0] * key_cache.shape[1],
        float(key_scale),
        float(value_scale),
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        BLOCK_H=block_h,
        BLOCK_D=block_d,
        QUANTISED=quantised,
        enable_fp_fusion=True,
    )


def _last_dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


@triton.jit(do_not_specialize=["num_slots"], do_not_specialize_on_alignment=["slot_mapping"])
def _write_kv(
    key,
    value,
    key_cache,
    value_cache,
    slot_mapping,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    num_slots,
    key_scale,
    value_scale,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    QUANTISED: tl.constexpr,
):
    """One program per token and `BLOCK_H` heads."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if (slot < 0) | (slot >= num_slots):
        return
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    dims = tl.arange(0, BLOCK_D)[None, :]
    mask = (heads < NUM_HEADS) & (dims < HEAD_DIM)
    where = (slot * NUM_HEADS + heads) * HEAD_DIM + dims
    keys = tl.load(key + token * key_token_stride + heads * key_head_stride + dims, mask=mask)
    values = tl.load(value + token * value_token_stride + heads * value_head_stride + dims, mask=mask)
    if QUANTISED:
        keys = narrow(tl.div_rn(keys.to(tl.float32), key_scale))
        values = narrow(tl.div_rn(values.to(tl.float32), value_scale))
    tl.store(key_cache + where, keys, mask=mask)
    tl.store(value_cache + where, values, mask=mask)


def copy_blocks(
    source_caches: Sequence[tuple[Tensor, Tensor]],
    destination_caches: Sequence[tuple[Tensor, Tensor]],
    sources: Sequence[int],
    destinations: Sequence[int],
) -> None:
    """See `kernels.reference.copy_blocks`. All caches of a tier have the same shape and dtype, contiguous.

    Within a device: one launch for all layers, or two where a block is both read and written. Between
    devices: blocks are gathered into one buffer, which crosses in one copy, and are scattered there. Towards
    the host the scatter has to wait for the copy; towards a GPU all but the gather is asynchronous.
    """
    if len(sources) != len(destinations):
        raise ValueError(f"{len(sources)} sources and {len(destinations)} destinations")
    flat_sources = [cache for layer in source_caches for cache in layer]
    flat_destinations = [cache for layer in destination_caches for cache in layer]
    if len(flat_sources) != len(flat_destinations):
        raise ValueError(f"{len(source_caches)} source layers and {len(destination_caches)} destinations")
    if not sources or not flat_sources:
        return
    _check_blocks(sources, len(flat_sources[0]))
    _check_blocks(destinations, len(flat_destinations[0]))

    device, target = flat_sources[0].device, flat_destinations[0].device
    disjoint = flat_sources[0].data_ptr() != flat_destinations[0].data_ptr()
    if device == target and (disjoint or not set(sources) & set(destinations)):
        _move(flat_sources, flat_destinations, sources, destinations)
        return
    staging = gather_blocks(flat_sources, sources)
    if device != target:
        crossed = torch.empty_like(staging, device=target, pin_memory=target.type == "cpu")
        crossed.copy_(staging, non_blocking=True)
        if target.type == "cpu":
            torch.cuda.current_stream(device).synchronize()
        staging = crossed
    scatter_blocks(staging, flat_destinations, destinations)


def gather_blocks(caches: Sequence[Tensor], blocks: Sequence[int]) -> Tensor:
    """`[len(caches), len(blocks), *block]`, contiguous on the caches' device; pinned if that is the host."""
    first = caches[0]
    # Pinning needs a GPU; without one nothing crosses either.
    pinned = first.device.type == "cpu" and torch.cuda.is_available()
    shape = (len(caches), len(blocks), *first.shape[1:])
    staging = torch.empty(shape, dtype=first.dtype, device=first.device, pin_memory=pinned)
    if _launchable(first):
        _move(caches, staging.unbind(), blocks, range(len(blocks)))
    else:
        index = torch.tensor(blocks)
        for cache, gathered in zip(caches, staging, strict=True):
            torch.index_select(_bytes(cache), 0, index, out=_bytes(gathered))
    return staging


def scatter_blocks(staging: Tensor, caches: Sequence[Tensor], blocks: Sequence[int]) -> None:
    """Undoes `gather_blocks`, into blocks of any number, in place."""
    if _launchable(staging):
        _move(staging.unbind(), caches, range(len(blocks)), blocks)
    else:
        index = torch.tensor(blocks)
        for cache, gathered in zip(caches, staging, strict=True):
            _bytes(cache).index_copy_(0, index, _bytes(gathered))


def _launchable(tensor: Tensor) -> bool:
    """Whether kernels reach it: always on a GPU, and on the CPU under the interpreter."""
    return tensor.is_cuda or not isinstance(_move_words, triton.JITFunction)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.flatten(1).view(torch.uint8)


def _check_blocks(blocks: Sequence[int], limit: int) -> None:
    if min(blocks) < 0 or max(blocks) >= limit:
        raise IndexError(f"blocks {min(blocks)} to {max(blocks)} don't all lie in a cache of {limit}")


def _move(
    sources: Sequence[Tensor],
    destinations: Sequence[Tensor],
    from_blocks: Sequence[int],
    to_blocks: Sequence[int],
) -> None:
    """`destinations[i][to_blocks[j]] = sources[i][from_blocks[j]]` for all `i` and `j`, in any order."""
    first = sources[0]
    for cache in (*sources, *destinations):
        if cache.shape[1:] != first.shape[1:] or cache.dtype != first.dtype or not cache.is_contiguous():
            raise ValueError(f"a cache is {cache.dtype} {list(cache.shape)}, not like the first, and dense")
    size = first[0].numel() * first.dtype.itemsize
    from_pointers = tuple(cache.data_ptr() for cache in sources)
    to_pointers = tuple(cache.data_ptr() for cache in destinations)
    wide = all(number % 8 == 0 for number in (size, *from_pointers, *to_pointers))
    words = size // 8 if wide else size
    pairs = _on_device((*from_blocks, *to_blocks), first.device)
    grid = (len(from_blocks), triton.cdiv(words, _MOVED_WORDS), len(sources))
    _move_words[grid](
        _pointers(from_pointers, first.device),
        _pointers(to_pointers, first.device),
        pairs,
        len(from_blocks),
        words,
        BLOCK=_MOVED_WORDS,
        WIDE=wide,
        enable_fp_fusion=True,
    )


@lru_cache(maxsize=8)
def _pointers(pointers: tuple[int, ...], device: torch.device) -> Tensor:
    """Kept, as the caches of a shard stay where they are."""
    return _on_device(pointers, device)


def _on_device(numbers: Sequence[int], device: torch.device) -> Tensor:
    host = torch.tensor(numbers, dtype=torch.int64, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


@triton.jit(do_not_specialize=["num_pairs"])
def _move_words(
    sources,
    destinations,
    pairs,
    num_pairs,
    words,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    """One program per `BLOCK` words of a block of a cache: 8 bytes each if `WIDE`, else 1."""
    pair = tl.program_id(0)
    cache = tl.program_id(2)
    if WIDE:
        source = tl.load(sources + cache).to(tl.pointer_type(tl.int64))
        destination = tl.load(destinations + cache).to(tl.pointer_type(tl.int64))
    else:
        source = tl.load(sources + cache).to(tl.pointer_type(tl.int8))
        destination = tl.load(destinations + cache).to(tl.pointer_type(tl.int8))
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < words
    moved = tl.load(source + tl.load(pairs + pair) * words + offsets, mask=mask)
    tl.store(destination + tl.load(pairs + num_pairs + pair) * words + offsets, moved, mask=mask)
