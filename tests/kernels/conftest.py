"""Lets the Triton kernels run here: compiled where there is a GPU, elsewhere under Triton's interpreter."""

import atexit
import importlib
import importlib.util
import os
import sys
from typing import Any

import numpy as np
import pytest
import torch


def _import_under_interpreter() -> None:
    """Triton reads `TRITON_INTERPRET` as it decorates a function, those of its own library included.

    So it is set while Triton and our kernels are imported, and no longer: other tests' child processes don't
    inherit it. `transformers` may have imported Triton compiled before; nothing uses that without a GPU.
    """
    for name in [name for name in sys.modules if f"{name}.".startswith(("triton.", "kernels.triton."))]:
        # The extension module can't be loaded twice.
        if not name.startswith("triton._C"):
            del sys.modules[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "TRITON_INTERPRET", "1")
        # Part of Triton is imported at the first launch.
        importlib.import_module("kernels.triton").silu_and_mul(torch.ones(1, 2))


def _mend_bfloat16() -> None:
    """The interpreter, as of Triton 3.9, truncates to bfloat16, where GPUs round to nearest, and multiplies
    matrices of it as the integers that their bits spell."""
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    builder: Any = interpreter.InterpreterBuilder
    handle: Any = interpreter.TensorHandle
    bfloat16, float32 = interpreter.tl.bfloat16, interpreter.tl.float32
    cast, dot = builder.cast_impl, builder.create_dot

    def rounding_cast(self: Any, source: Any, target: Any) -> Any:
        if source.dtype.scalar != float32 or target.scalar != bfloat16:
            return cast(self, source, target)
        bits = source.data.view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return handle(np.where(np.isnan(source.data), 0x7FC0, rounded).astype(np.uint16), bfloat16)

    def widened(matrix: Any) -> Any:
        if matrix.dtype.scalar != bfloat16:
            return matrix
        return handle((matrix.data.astype(np.uint32) << 16).view(np.float32), float32)

    def wide_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, widened(a), widened(b), *rest)

    builder.cast_impl, builder.create_dot = rounding_cast, wide_dot


if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_triton_*.py"]
elif not torch.cuda.is_available():
    # As Python ends, Triton's bindings list what the second import left, below pytest's summary.
    atexit.register(os.dup2, os.open(os.devnull, os.O_WRONLY), 2)
    _import_under_interpreter()
    _mend_bfloat16()
