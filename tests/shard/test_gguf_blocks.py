"""Matrices that stay in the blocks of their GGUF file compute what the converted folder does."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file
from torch import Tensor

from kernels import AttentionBatch, BlockQuantised
from shard import kv_cache
from shard.gguf_import import block_matrices, import_gguf
from shard.model_config import load_model_config
from shard.models import DecoderModel
from shard.weights import load_model
from tests.oracle import random_tokens, tiny_model
from tests.shard.gguf_writer import write_gguf

FAMILIES = [("Llama", "llama", {}), ("Qwen2", "qwen2", {}), ("Qwen3", "qwen3", {"head_dim": 32})]


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize(("family", "arch", "config"), FAMILIES)
def test_blocks_hold_the_values_that_the_conversion_writes(
    family: str, arch: str, config: dict[str, Any], kind: str, tmp_path: Path
) -> None:
    model = tiny_model(tmp_path, family, **config)
    source = write_gguf(tmp_path / "a.gguf", model, arch, GGMLQuantizationType[kind])
    written = load_file(import_gguf(source, tmp_path / "model") / "model.safetensors")

    matrices = block_matrices(source)

    assert matrices.keys() == {name for name, tensor in written.items() if tensor.dim() == 2}
    for name, matrix in matrices.items():
        assert torch.equal(matrix.dense(torch.bfloat16), written[name])


def test_matrices_in_blocks_give_the_same_logits(tmp_path: Path) -> None:
    model = tiny_model(tmp_path, "Llama", tie_word_embeddings=True)
    source = write_gguf(tmp_path / "a.gguf", model, "llama", GGMLQuantizationType.Q4_1)
    folder = import_gguf(source, tmp_path / "model")
    config, cpu = load_model_config(folder), torch.device("cpu")
    dense = load_model(folder, config, torch.bfloat16, cpu, 64).prepare()
    blocks = load_model(folder, config, torch.bfloat16, cpu, 64, blocks=block_matrices(source))
    assert isinstance(blocks.layers[0].qkv.weight, BlockQuantised)
    filled = {one.name for one in blocks.placements() if one.tensor.dim() == 2}
    assert filled == {"model.embed_tokens.weight"}
    blocks.prepare()

    expected, found = (paged_logits(model, random_tokens(40)) for model in (dense, blocks))

    assert torch.equal(expected, found)


def paged_logits(model: DecoderModel, tokens: list[int]) -> Tensor:
    """Logits of every token, the prompt being one block."""
    size = len(tokens)
    caches = kv_cache.allocate(model.config, 1, size, torch.bfloat16, torch.device("cpu"))
    batch = AttentionBatch.build(torch.zeros(1, 1, dtype=torch.int32), [size], [size], size)
    with torch.inference_mode():
        return model.compute_logits(model.forward(torch.tensor(tokens), batch, caches))
