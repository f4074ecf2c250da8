"""Which model a benchmark measures: a folder for everybody, and the GGUF file for who reads only that."""

import asyncio
import json
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

from benchmarks.command import BareParser, BenchmarkError
from benchmarks.random_model import SHAPES, random_model
from launcher.embedded_model import ImportFailedError, embedded_gguf, import_gguf
from launcher.preflight import PreflightError


@dataclass(frozen=True)
class Model:
    """One model in both forms; a random one has no GGUF file."""

    folder: Path
    gguf: Path | None
    vocab_size: int
    name: str


def add_flags(parser: BareParser) -> None:
    """Which model, where and in which type."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", type=Path, help="model folder or .gguf file; by default the embedded model")
    which.add_argument("--model-shape", choices=SHAPES, help="random weights of this shape")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where everybody computes")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the weights")


def find(options: Namespace) -> Model:
    """The model that the flags name.

    Raises:
        BenchmarkError: there is no such model, or it can't be converted.
    """
    if shape := options.model_shape:
        return _model(random_model(shape, options.dtype), None, shape)
    if options.model and options.model.is_dir():
        return _model(options.model.resolve(), None, options.model.name)
    try:
        gguf = options.model.resolve() if options.model else embedded_gguf()
        if not gguf.is_file():
            raise BenchmarkError(f"--model {gguf}: no such folder or file")
        return _model(asyncio.run(import_gguf(gguf, lambda done, total: None)), gguf, gguf.stem)
    except PreflightError as error:
        raise BenchmarkError(str(error)) from None
    except ImportFailedError:
        raise BenchmarkError(f"{gguf} could not be converted; the reason is above") from None


def _model(folder: Path, gguf: Path | None, name: str) -> Model:
    try:
        vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    except (OSError, ValueError, KeyError):
        raise BenchmarkError(f"--model {folder}: holds no config.json with a vocab_size") from None
    return Model(folder, gguf, vocab_size, name)
