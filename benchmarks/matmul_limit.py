"""What no engine can beat here: the model's matrix products alone, at the batch shapes of the steps it ran.

Weights have memory of their own per layer, as a model's have. Each batch size runs the fastest of what there
is: torch's `linear` on plain weights and, on a CPU, on weights prepacked for oneDNN, or our own kernels on
weights packed for them. Logits are computed only for the rows that are sampled.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

import kernels
from benchmarks.shard_alone import limits_for, record
from benchmarks.workload import Answer, Run, Work, output_tokens
from shard.model_config import ModelConfig, load_model_config

# Of the batch, as a hint to oneDNN's choice of layout.
PACKED_FOR: Final = (16, 64, 256)

Shape = tuple[int, int]
"""Tokens, and rows of logits."""


class Product(NamedTuple):
    """A product with a weight, and the width of its input."""

    width: int
    run: Callable[[Tensor], Tensor]


class MatmulLimit:
    """Holds weights of a model's shapes."""

    def __init__(self, model: Path, dtype: torch.dtype, device: torch.device) -> None:
        config = load_model_config(model)
        self._inputs = [config.hidden_size, config.num_heads * config.head_dim, config.intermediate_size]
        self._dtype, self._device = dtype, device
        weights = [[self._weight(*sizes) for sizes in _sizes(config)] for _ in range(config.num_layers)]
        head = self._weight(config.vocab_size, config.hidden_size)
        packs = device.type == "cpu" and dtype == torch.bfloat16 and torch._C._has_mkldnn
        hints = PACKED_FOR if packs else ()
        # By kind of product: those of all layers in order, and the head.
        self._kinds = [_kind(weights, head, _plain)]
        self._kinds += [_kind(weights, head, partial(_packed, hint)) for hint in hints]
        if device.type == "cpu" and kernels.cpu_kernels():
            self._kinds.append(_kind(weights, head, _ours))
        self._fastest: dict[Shape, tuple[list[Product], Product]] = {}

    def _weight(self, rows: int, columns: int) -> Tensor:
        return torch.empty(rows, columns, dtype=self._dtype, device=self._device).normal_(0, 0.02)

    @torch.inference_mode()
    def seconds(self, shapes: Sequence[Shape]) -> float:
        """Of all steps, one after another."""
        chosen = [self._choose(shape) for shape in shapes]
        inputs = {tokens: self._batch(tokens) for tokens in {size for shape in shapes for size in shape}}
        self._wait()
        began = time.perf_counter()
        for (tokens, rows), (layers, head) in zip(shapes, chosen, strict=True):
            _step(layers, head, inputs[tokens], inputs[rows])
        self._wait()
        return time.perf_counter() - began

    def _batch(self, tokens: int) -> dict[int, Tensor]:
        """Random inputs by their width."""
        return {
            width: torch.randn(tokens, width, device=self._device).to(self._dtype)
            for width in set(self._inputs)
        }

    def _choose(self, shape: Shape) -> tuple[list[Product], Product]:
        """The fastest kind for about this size."""
        size = (1 << (shape[0] - 1).bit_length(), min(shape[1], 1))
        if size not in self._fastest:
            batch, rows = self._batch(size[0]), self._batch(size[1])
            times = []
            for layers, head in self._kinds:
                _step(layers, head, batch, rows)
                self._wait()
                began = time.perf_counter()
                _step(layers, head, batch, rows)
                _step(layers, head, batch, rows)
                self._wait()
                times.append(time.perf_counter() - began)
            self._fastest[size] = self._kinds[times.index(min(times))]
        return self._fastest[size]

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _sizes(config: ModelConfig) -> list[tuple[int, int]]:
    """Rows and columns of one layer's weights, stacked where they share an input."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries = config.num_heads * config.head_dim
    keys_and_values = 2 * config.num_kv_heads * config.head_dim
    return [(queries + keys_and_values, hidden), (hidden, queries), (2 * inner, hidden), (hidden, inner)]


def _kind(
    weights: Iterable[Iterable[Tensor]], head: Tensor, make: Callable[[Tensor], Product]
) -> tuple[list[Product], Product]:
    return [make(weight) for layer in weights for weight in layer], make(head)


def _plain(weight: Tensor) -> Product:
    return Product(weight.shape[1], lambda x: F.linear(x, weight))


def _packed(hint: int, weight: Tensor) -> Product:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, hint)
    return Product(
        weight.shape[1], lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    )


def _ours(weight: Tensor) -> Product:
    return Product(weight.shape[1], kernels.prepare_linear(weight, weight.dtype).forward)


def _step(layers: list[Product], head: Product, batch: dict[int, Tensor], rows: dict[int, Tensor]) -> None:
    for product in layers:
        product.run(batch[product.width])
    sampled = rows[head.width]
    if len(sampled):
        head.run(sampled)


class LimitContender:
    """The matmul limit, in its turn among the others."""

    def __init__(self, model: Path, vocab_size: int, dtype: str, device: str) -> None:
        self._limit = MatmulLimit(model, getattr(torch, dtype), torch.device(device))
        self._vocab_size, self._device = vocab_size, device

    def run(self, work: Work) -> Run:
        """The products of the steps that this work takes. A request alone is timed as its client would."""
        steps = record(work, limits_for(work, self._vocab_size, self._device))
        shapes = [(step.num_tokens, step.num_rows) for step in steps]
        if len(work) > 1:
            return Run(self._limit.seconds(shapes), output_tokens(work))
        first = next(index for index, (_, rows) in enumerate(shapes, 1) if rows)
        tokens = work[0].max_tokens
        ttft_s = self._limit.seconds(shapes[:first])
        end_s = ttft_s + self._limit.seconds(shapes[first:])
        return Run(end_s, tokens, (Answer(tokens, ttft_s, end_s),))

    def close(self) -> None:
        """Nothing outlives this process."""
