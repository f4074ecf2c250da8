"""The operations that callers import: each picks its implementation by the device of its tensors.

Triton is imported with the first tensor on a GPU; without one, nothing needs it.
"""

from collections.abc import Callable, Sequence
from functools import cache, wraps
from importlib import import_module
from typing import ParamSpec, TypeVar

from torch import Tensor

from kernels import reference

P = ParamSpec("P")
R = TypeVar("R")


def _by_device(operation: Callable[P, R]) -> Callable[P, R]:
    """`operation` of `reference`, or its namesake in Triton where a first argument's tensor is on a GPU."""

    @cache
    def on_gpu() -> Callable[P, R]:
        implementation: Callable[P, R] = getattr(import_module("kernels.triton"), operation.__name__)
        return implementation

    @wraps(operation)
    def dispatched(*args: P.args, **kwargs: P.kwargs) -> R:
        first = args[0]
        chosen = on_gpu() if isinstance(first, Tensor) and first.is_cuda else operation
        return chosen(*args, **kwargs)

    return dispatched


paged_attention = _by_device(reference.paged_attention)
rms_norm = _by_device(reference.rms_norm)
add_rms_norm = _by_device(reference.add_rms_norm)
rotary_embedding = _by_device(reference.rotary_embedding)
silu_and_mul = _by_device(reference.silu_and_mul)
write_kv = _by_device(reference.write_kv)
# Small and the same everywhere: nothing is gained by a kernel of its own.
route = reference.route
mix_experts = _by_device(reference.mix_experts)


@wraps(reference.copy_blocks)
def copy_blocks(
    source_caches: Sequence[tuple[Tensor, Tensor]],
    destination_caches: Sequence[tuple[Tensor, Tensor]],
    sources: Sequence[int],
    destinations: Sequence[int],
) -> None:
    on_gpu = any(cache.is_cuda for layer in (*source_caches[:1], *destination_caches[:1]) for cache in layer)
    chosen = import_module("kernels.triton") if on_gpu else reference
    chosen.copy_blocks(source_caches, destination_caches, sources, destinations)
