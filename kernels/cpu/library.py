"""The compiled CPU kernels, bound through ctypes."""

import ctypes
import functools
import logging
from ctypes import c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

from kernels.cpu.build import is_intact, library_path, supported_sets

log = logging.getLogger(__name__)


class Shape(ctypes.Structure):
    """Mirrors `Shape` in decoder.cpp."""

    _fields_ = (
        *((name, c_int32) for name in ("hidden_size", "num_heads", "num_kv_heads", "head_dim")),
        *((name, c_float) for name in ("eps", "scale", "soft_cap")),
    )


class Experts(ctypes.Structure):
    """Mirrors `Experts` in experts.h: addresses, and arrays of the addresses of panels."""

    _fields_ = (
        *((name, c_void_p) for name in ("gate", "shared_gate")),
        *((name, ctypes.POINTER(c_void_p)) for name in ("gate_up", "down")),
        *((name, c_int32) for name in ("num_experts", "first", "num_held", "num_per_token")),
        *((name, c_int32) for name in ("expert_size", "normalise")),
    )


class Layer(ctypes.Structure):
    """Mirrors `Layer` in decoder.cpp: addresses of weights, panels, biases and caches."""

    _fields_ = (
        *((name, c_void_p) for name in ("attention_norm", "query_norm", "key_norm", "mlp_norm")),
        *((name, c_void_p) for name in ("qkv", "output", "gate_up", "down")),
        *((name, c_void_p) for name in ("qkv_bias", "output_bias", "gate_up_bias", "down_bias")),
        *((name, c_void_p) for name in ("key_cache", "value_cache")),
        ("experts", ctypes.POINTER(Experts)),
        *((f"{name}_format", c_int32) for name in ("qkv", "output", "gate_up", "down")),
        *((name, c_int32) for name in ("sliding_window", "mlp_size")),
    )


Callback = ctypes.CFUNCTYPE(None)


class Step(ctypes.Structure):
    """Mirrors `Step` in decoder.cpp."""

    _fields_ = (
        *((name, c_int32) for name in ("num_seqs", "num_tokens", "block_size", "table_stride")),
        *((name, c_void_p) for name in ("slot_mapping", "block_tables", "query_start", "seq_lens")),
        *((name, c_void_p) for name in ("cos", "sin")),
        ("sum_over_ranks", Callback),
        ("adds_to_hidden", c_int32),
    )


@functools.cache
def best_set() -> str | None:
    """The best instruction set whose library this machine's CPU can run; None where there is none."""
    return next((name for name in supported_sets(cpu_flags()) if load_set(name)), None)


def load() -> ctypes.CDLL | None:
    """The best library for this machine's CPU; None where none was built or none can be loaded."""
    name = best_set()
    return load_set(name) if name else None


@functools.cache
def load_set(instruction_set: str) -> ctypes.CDLL | None:
    """The library for one instruction set; None where it wasn't built, or can't be used, which is logged."""
    path = library_path(instruction_set)
    try:
        if is_intact(path):
            return bind(path)
        reason = "it is damaged"
    except FileNotFoundError:
        return None
    except (OSError, AttributeError) as error:
        reason = str(error)
    log.warning("CPU kernels %s can't be used: %s; run `make kernels`", path, reason)
    return None


def bind(path: Path) -> ctypes.CDLL:
    """Loads a library and declares its functions.

    torch must have been imported: its OpenMP runtime is the one that the library uses.

    Raises:
        OSError: it can't be loaded.
        AttributeError: it is another library.
    """
    library = ctypes.CDLL(str(path))
    _declare(library)
    return library


def _declare(library: ctypes.CDLL) -> None:
    library.pagoda_packed_bytes.argtypes = (c_int32,) * 5
    library.pagoda_packed_bytes.restype = c_int64
    functions: dict[str, tuple[Any, ...]] = {
        "pack_quantised": (c_void_p, c_int32, c_int32, c_int32, c_int32, c_void_p)
    }
    for suffix in ("float32", "bfloat16"):
        layers, step = ctypes.POINTER(Layer), ctypes.POINTER(Step)
        functions[f"run_layers_{suffix}"] = (ctypes.POINTER(Shape), layers, c_int32, step, c_void_p)
        functions[f"pack_{suffix}"] = (c_void_p, c_int32, c_int32, c_int32, c_void_p)
        functions[f"linear_{suffix}"] = (c_void_p, c_int32, c_void_p, *(c_int32,) * 3, c_void_p)
    for name, arguments in functions.items():
        function = getattr(library, f"pagoda_{name}")
        function.argtypes, function.restype = arguments, None


def cpu_flags() -> frozenset[str]:
    """What /proc/cpuinfo lists of the first CPU."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()
