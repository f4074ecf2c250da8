"""A tiny model that shard tests share; loading is what costs."""

from pathlib import Path
from typing import Any

import pytest
import torch

from shard.executor import StepExecutor
from shard.model_config import load_model_config
from shard.weights import load_model
from tests.oracle import tiny_model

CPU = torch.device("cpu")


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_model(folder)
    return folder


@pytest.fixture(scope="session")
def reference(tiny_folder: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(tiny_folder).eval()


@pytest.fixture
def executor(tiny_folder: Path) -> StepExecutor:
    config = load_model_config(tiny_folder)
    return StepExecutor(
        load_model(tiny_folder, config, torch.float32, CPU, 128).prepare(), torch.float32, CPU
    )
