"""Reads a GGUF file: its metadata, and its tensors a few rows at a time.

Format: `docs/gguf.md` of the ggml project, versions 2 and 3. The `gguf` package dequantises; its reader isn't
used, because it trusts the counts in the file: a few bytes can make it loop for hours or fill the memory.
"""

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType, dequantize
from torch import Tensor

from shard.model_config import ModelError

# The largest vocabularies with their merges take about 20 MB.
MAX_HEADER_BYTES = 1 << 26
MAX_DIMENSIONS = 4
VERSIONS = (2, 3)

_SCALARS = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
}
_FLOATS = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}


class GgufTensor(NamedTuple):
    """One tensor: `shape` in torch's order, the contiguous dimension last; `offset` in bytes in the file."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int

    @property
    def dtype(self) -> torch.dtype | None:
        """None if it is quantised."""
        return _FLOATS.get(self.kind)

    @property
    def num_bytes(self) -> int:
        """Its size in the file."""
        block: int
        block_bytes: int
        block, block_bytes = GGML_QUANT_SIZES[self.kind]
        return math.prod(self.shape) // block * block_bytes


class Metadata:
    """The key-value pairs of a GGUF file. Getters raise `ModelError` for a missing or wrong value."""

    def __init__(self, source: Path, values: dict[str, Any]) -> None:
        self.source = source
        self._values = values

    def error(self, key: str, supported: str) -> ModelError:
        """What to raise for a value that can't be used."""
        value = self._values.get(key)
        said = "is missing" if value is None else f"is {value!r:.200}"
        return ModelError(f"{self.source}: {key} {said}; {supported}")

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def integer(self, key: str, default: int | None = None, low: int = 1, high: int = 2**31 - 1) -> int:
        value = self._values.get(key, default)
        if type(value) is not int or not low <= value <= high:
            raise self.error(key, f"it must be an integer from {low} to {high}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12:
            raise self.error(key, "it must be a number over 0")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self._values.get(key, default)
        if type(value) is not bool:
            raise self.error(key, "it must be true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._values.get(key, default)
        if not isinstance(value, str):
            raise self.error(key, "it must be a string")
        return value

    def texts(self, key: str) -> list[str]:
        value = self._values.get(key)
        if not isinstance(value, list):
            raise self.error(key, "it must be an array of strings")
        return value

    def numbers(self, key: str, count: int) -> list[Any]:
        """An array of `count` numbers."""
        value = self._values.get(key)
        if not isinstance(value, np.ndarray) or len(value) != count:
            raise self.error(key, f"it must be an array of {count} numbers")
        return list(value.tolist())


class GgufFile:
    """An open GGUF file with a header that was checked: every tensor lies within it and can be dequantised.

    Attributes:
        metadata: The key-value pairs.
        tensors: By name.
        ROWS_ELEMENTS: About how many weights `rows` holds in memory at a time.
    """

    ROWS_ELEMENTS = 1 << 22

    def __init__(self, path: Path) -> None:
        """Opens `path` and reads the header. Raises `ModelError` if it isn't a sound GGUF file."""
        self.path = path
        try:
            self._file: BinaryIO = path.open("rb")
            self._size = os.fstat(self._file.fileno()).st_size
        except OSError as error:
            raise ModelError(f"{path}: can't be read: {error.strerror}") from None
        try:
            self._read_header()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> "GgufFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def rows(self, tensor: GgufTensor, group: int = 1) -> Iterator[Tensor]:
        """The tensor [rows, columns] (of one dimension: [1, columns]), a multiple of `group` rows at a time.

        In the file's own float dtype, or float32 where it is quantised. Raises `ModelError` if reading fails.
        """
        columns = tensor.shape[-1]
        num_rows = math.prod(tensor.shape[:-1])
        row_bytes = tensor.num_bytes // num_rows
        step = max(self.ROWS_ELEMENTS // (columns * group), 1) * group
        for start in range(0, num_rows, step):
            count = min(step, num_rows - start)
            raw = np.frombuffer(
                self._read_at(tensor.offset + start * row_bytes, count * row_bytes), np.uint8
            ).reshape(count, row_bytes)
            # torch wants memory that may be written.
            if tensor.dtype is not None:
                yield torch.from_numpy(raw.copy()).view(tensor.dtype)
            else:
                yield torch.from_numpy(np.array(dequantize(raw, tensor.kind), dtype=np.float32))

    def raw_rows(self, tensor: GgufTensor) -> Tensor:
        """A matrix as it is stored: uint8 [rows, bytes of a row]. Raises `ModelError` if reading fails."""
        data = bytearray(self._read_at(tensor.offset, tensor.num_bytes))
        return torch.frombuffer(data, dtype=torch.uint8).view(tensor.shape[0], -1)

    def _read_at(self, offset: int, count: int) -> bytes:
        try:
            self._file.seek(offset)
            data = self._file.read(count)
        except OSError as error:
            raise ModelError(f"{self.path}: can't be read: {error.strerror}") from None
        if len(data) < count:
            raise ModelError(f"{self.path}: cut short while it was read")
        return data

    def _error(self, reason: str) -> ModelError:
        return ModelError(f"{self.path}: not a sound GGUF file: {reason}")

    def _take(self, count: int) -> bytes:
        end = self._file.tell() + count
        if end > self._size:
            raise self._error(f"cut short in its header: it needs {end} bytes and has {self._size}")
        if end > MAX_HEADER_BYTES:
            raise self._error(f"its header needs {end} bytes; the limit is {MAX_HEADER_BYTES}")
        return self._file.read(count)

    def _integer(self, size: int) -> int:
        return int.from_bytes(self._take(size), "little")

    def _string(self) -> str:
        data = self._take(self._integer(8))
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise self._error(f"the string {data[:40]!r} isn't UTF-8") from None

    def _value(self, key: str) -> Any:
        kind = self._value_type(key)
        if kind == GGUFValueType.STRING:
            return self._string()
        if kind != GGUFValueType.ARRAY:
            return self._scalars(kind, 1)[0].item()
        kind, count = self._value_type(key), self._integer(8)
        if kind == GGUFValueType.STRING:
            return [self._string() for _ in range(count)]
        if kind == GGUFValueType.ARRAY:
            raise self._error(f"{key} is an array of arrays")
        return self._scalars(kind, count)

    def _value_type(self, key: str) -> GGUFValueType:
        number = self._integer(4)
        try:
            return GGUFValueType(number)
        except ValueError:
            raise self._error(f"{key} has a value of the unknown type {number}") from None

    def _scalars(self, kind: GGUFValueType, count: int) -> Any:
        dtype = np.dtype(_SCALARS[kind])
        return np.frombuffer(self._take(count * dtype.itemsize), dtype)

    def _read_header(self) -> None:
        if self._file.read(4) != b"GGUF":
            raise ModelError(f"{self.path}: not a GGUF file: it doesn't begin with 'GGUF'")
        version = self._integer(4)
        if version not in VERSIONS:
            big_endian = " (big-endian)" if version & 0xFFFF == 0 else ""
            raise self._error(f"version {version}{big_endian}; supported: {VERSIONS}, little-endian")
        tensor_count, key_count = self._integer(8), self._integer(8)
        values: dict[str, Any] = {}
        for _ in range(key_count):
            key = self._string()
            if key in values:
                raise self._error(f"{key} comes twice")
            values[key] = self._value(key)
        self.metadata = Metadata(self.path, values)

        infos = [self._tensor_info() for _ in range(tensor_count)]
        alignment = self.metadata.integer("general.alignment", 32)
        data_start = -(-self._file.tell() // alignment) * alignment
        self.tensors: dict[str, GgufTensor] = {}
        for info in infos:
            if info.name in self.tensors:
                raise self._error(f"tensor {info.name} comes twice")
            self.tensors[info.name] = tensor = info._replace(offset=data_start + info.offset)
            end = tensor.offset + tensor.num_bytes
            if end > self._size:
                raise self._error(
                    f"cut short: tensor {tensor.name} ends at byte {end}, and the file has {self._size}"
                )

    def _tensor_info(self) -> GgufTensor:
        name, dimensions = self._string(), self._integer(4)
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise self._error(f"tensor {name} has {dimensions} dimensions; supported: 1 to {MAX_DIMENSIONS}")
        # Stored with the contiguous dimension first.
        shape = tuple(self._integer(8) for _ in range(dimensions))[::-1]
        kind = self._quantisation(name, self._integer(4))
        block = GGML_QUANT_SIZES[kind][0]
        if 0 in shape or shape[-1] % block:
            raise self._error(f"tensor {name} has shape {list(shape)}; rows are multiples of {block}")
        return GgufTensor(name, shape, kind, self._integer(8))

    def _quantisation(self, name: str, number: int) -> GGMLQuantizationType:
        try:
            kind = GGMLQuantizationType(number)
            if kind not in _FLOATS:
                dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except (ValueError, NotImplementedError):
            known = GGMLQuantizationType._value2member_map_.get(number)
            called = f"{number} ({known.name})" if known else str(number)
            raise ModelError(
                f"{self.path}: tensor {name} has the type {called}, which isn't supported; "
                "convert it to F16, BF16, F32, Q8_0, Q4_0 or a K quantisation"
            ) from None
        return kind
