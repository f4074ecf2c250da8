"""One function per operation, with one documented signature each, given in `kernels.reference`.

Callers import from here only, so nothing outside `kernels` knows which implementation ran. `kernels.dispatch`
chooses for the small operations, the functions below for those that prepare weights.

No `__version__` here: `transformers` takes a versioned top-level `kernels` for Hugging Face's package.
"""

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from kernels.batch import AttentionBatch
from kernels.block_quantised import FORMATS, BlockQuantised, Matrix
from kernels.cpu import decoder as cpu
from kernels.cpu import library
from kernels.decoder import ComposedDecoder, DecoderShape, KVCache, LayerWeights, PlainLinear, Ranks, dense
from kernels.dispatch import (
    add_rms_norm,
    copy_blocks,
    mix_experts,
    paged_attention,
    rms_norm,
    rotary_embedding,
    route,
    silu_and_mul,
    write_kv,
)
from kernels.experts import Experts

__all__ = [
    "FORMATS",
    "AttentionBatch",
    "BlockQuantised",
    "Decoder",
    "DecoderShape",
    "Experts",
    "KVCache",
    "LayerWeights",
    "Linear",
    "Matrix",
    "Ranks",
    "add_rms_norm",
    "copy_blocks",
    "cpu_kernels",
    "cpu_kernels_missing",
    "keeps_blocks",
    "mix_experts",
    "paged_attention",
    "prepare_decoder",
    "prepare_linear",
    "rms_norm",
    "rotary_embedding",
    "route",
    "silu_and_mul",
    "write_kv",
]


class Decoder(Protocol):
    """A stack of layers that is ready to run; `ComposedDecoder` says what each argument is."""

    def forward(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, batch: AttentionBatch, kv_caches: list[KVCache]
    ) -> Tensor:
        """`[num_tokens, hidden_size]` to the same."""


class Linear(Protocol):
    """A linear map that is ready to run."""

    def forward(self, x: Tensor) -> Tensor:
        """`[num_rows, in_features]` to float32 `[num_rows, out_features]`."""


def cpu_kernels() -> str | None:
    """The instruction set of the compiled kernels that this machine's CPU runs; None where none are built."""
    return library.best_set()


def cpu_kernels_missing(device: torch.device) -> bool:
    """Whether models on `device` run on plain PyTorch only because nothing was compiled for this CPU."""
    return device.type == "cpu" and library.load() is None


def keeps_blocks(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `BlockQuantised` matrices stay so at run time; elsewhere they are as large as dense ones."""
    return device.type == "cpu" and dtype == torch.bfloat16 and library.load() is not None


def prepare_decoder(
    shape: DecoderShape,
    layers: Iterable[LayerWeights],
    dtype: torch.dtype,
    device: torch.device,
    ranks: Ranks | None = None,
) -> Decoder:
    """The layers, or a rank's part of them, in the form in which `device` runs them fastest.

    They are repacked one by one where that helps: an iterator that lets go of what it yielded never holds
    them all twice.
    """
    native = library.load() if device.type == "cpu" else None
    if native and cpu.supports(shape, dtype):
        return cpu.PackedDecoder(native, shape, layers, ranks)
    return ComposedDecoder(shape, [*layers], ranks)


def prepare_linear(weight: Matrix, dtype: torch.dtype) -> Linear:
    """`x @ weight.T` for rows of `dtype` and `weight` `[out_features, in_features]`."""
    device = weight.blocks.device if isinstance(weight, BlockQuantised) else weight.device
    native = library.load() if device.type == "cpu" else None
    if native and cpu.supports_linear(weight, dtype):
        return cpu.PackedLinear(native, weight, dtype)
    return PlainLinear(dense(weight, dtype))
