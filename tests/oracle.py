"""Tiny random models in Hugging Face folders, and what `transformers` makes of them."""

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

VOCAB_SIZE = 256
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tiny_model(folder: Path, family: str = "Llama", **config: Any) -> Any:
    """Saves a random float32 model of `family` (`Llama`, `Qwen2`, …) to `folder` and returns it.

    `config` overrides `SIZES`; attention is eager. Every parameter is random: fresh models of `transformers`
    have zero biases and norms of one, behind which a missing bias or norm would go unseen.
    """
    config_class = getattr(transformers, f"{family}Config")
    model_class = getattr(transformers, f"{family}ForCausalLM")
    model = model_class._from_config(config_class(**SIZES | config), attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.3 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.5 * noise)
            else:
                parameter.copy_(noise if "embed" in name else 1.5 * noise / parameter.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    return model


def random_tokens(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(VOCAB_SIZE, (count,), generator=generator).tolist()
    return tokens


@torch.no_grad()
def oracle_logits(model: Any, tokens: list[int]) -> Tensor:
    """What `transformers` gives for one sequence: float32 `[len(tokens), vocab_size]`."""
    logits: Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits.float()
