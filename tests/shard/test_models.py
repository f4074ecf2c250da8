"""Our decoder against `transformers`, on a paged cache whose every unwritten slot is NaN."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from kernels import AttentionBatch
from shard.model_config import load_model_config
from shard.models import DecoderModel
from shard.weights import load_model
from tests.oracle import oracle_logits, random_tokens, tiny_model

MAX_MODEL_LEN = 48
BLOCK_SIZE = 4
CPU = torch.device("cpu")

ROPE: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 24,
        "beta_fast": 4.0,
        "beta_slow": 0.5,
    },
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}
SLIDING = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
QWEN_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    **{f"llama-{name}": ("Llama", {"rope_parameters": rope}) for name, rope in ROPE.items()},
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-multi-head": ("Llama", {"num_key_value_heads": 4}),
    "llama-multi-query": ("Llama", {"num_key_value_heads": 1}),
    "llama-head-dim": ("Llama", {"head_dim": 24}),
    "mistral-sliding": ("Mistral", {"sliding_window": 9}),
    "mistral-full": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen2-sliding": ("Qwen2", SLIDING),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3-biases-sliding": ("Qwen3", {"head_dim": 32, "attention_bias": True, **SLIDING}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral-sliding": ("Mixtral", {"num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 9}),
    "qwen2-moe": (
        "Qwen2Moe",
        {**QWEN_EXPERTS, "shared_expert_intermediate_size": 48, "decoder_sparse_step": 2},
    ),
    "qwen2-moe-no-bias": (
        "Qwen2Moe",
        {**QWEN_EXPERTS, "shared_expert_intermediate_size": 48, "qkv_bias": False, "norm_topk_prob": True},
    ),
    "qwen3-moe": ("Qwen3Moe", {**QWEN_EXPERTS, "head_dim": 32, "norm_topk_prob": True}),
    "qwen3-moe-plain-layer": ("Qwen3Moe", {**QWEN_EXPERTS, "head_dim": 32, "mlp_only_layers": [1]}),
}
# The dynamic type has to start scaling inside the served length for its fixed scale to be put to the test.
MODELS["llama-dynamic"][1]["max_position_embeddings"] = 32


class Loaded(NamedTuple):
    oracle: Any
    model: DecoderModel


@pytest.fixture(scope="module", params=MODELS)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    family, config = MODELS[request.param]
    folder = tmp_path_factory.mktemp("model")
    oracle = tiny_model(folder, family, **config)
    return Loaded(oracle, load(folder, torch.float32))


def load(folder: Path, dtype: torch.dtype) -> DecoderModel:
    return load_model(folder, load_model_config(folder), dtype, CPU, MAX_MODEL_LEN).prepare()


class PagedSequences:
    """A shuffled pool of blocks full of NaN, from which sequences take blocks as they grow."""

    def __init__(self, model: DecoderModel, num_seqs: int) -> None:
        self.model = model
        num_blocks = num_seqs * -(-MAX_MODEL_LEN // BLOCK_SIZE) + 3
        config = model.config
        shape = (num_blocks, BLOCK_SIZE, config.num_kv_heads, config.head_dim)
        self.caches = [
            (
                torch.full(shape, torch.nan, dtype=model.norm.dtype),
                torch.full(shape, torch.nan, dtype=model.norm.dtype),
            )
            for _ in model.config.sliding_windows
        ]
        generator = torch.Generator().manual_seed(1)
        self.free: list[int] = torch.randperm(num_blocks, generator=generator).tolist()
        self.tables: list[list[int]] = [[] for _ in range(num_seqs)]
        self.lens = [0] * num_seqs
        self.logits: list[list[Tensor]] = [[] for _ in range(num_seqs)]

    def step(self, chunks: dict[int, list[int]]) -> None:
        """Computes the next tokens of some sequences, in the order of `chunks`, and keeps their logits."""
        for sequence, tokens in chunks.items():
            self.lens[sequence] += len(tokens)
            while len(self.tables[sequence]) * BLOCK_SIZE < self.lens[sequence]:
                self.tables[sequence].append(self.free.pop())
        width = max(len(self.tables[sequence]) for sequence in chunks) + 1
        # Entries past a table's end are nonsense on purpose.
        tables = [self.tables[sequence] + [-7] * (width - len(self.tables[sequence])) for sequence in chunks]
        counts = [len(tokens) for tokens in chunks.values()]
        lens = [self.lens[sequence] for sequence in chunks]
        batch = AttentionBatch.build(torch.tensor(tables, dtype=torch.int32), counts, lens, BLOCK_SIZE)

        token_ids = torch.tensor([token for tokens in chunks.values() for token in tokens])
        logits = self.model.compute_logits(self.model.forward(token_ids, batch, self.caches))
        for sequence, part in zip(chunks, logits.split_with_sizes(counts), strict=True):
            self.logits[sequence].append(part)

    def all_logits(self, sequence: int) -> Tensor:
        return torch.cat(self.logits[sequence])


def assert_same(actual: Tensor, expected: Tensor) -> None:
    """Float32 logits that differ by rounding only: by under 5e-5 of their spread, where 1e-5 was measured."""
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() < 5e-5 * expected.std()


def test_whole_prompt_gives_the_logits_of_transformers(loaded: Loaded) -> None:
    tokens = random_tokens(MAX_MODEL_LEN)
    paged = PagedSequences(loaded.model, 1)
    paged.step({0: tokens})
    assert_same(paged.all_logits(0), oracle_logits(loaded.oracle, tokens))


def test_chunks_on_scattered_blocks_give_the_same_logits(loaded: Loaded) -> None:
    tokens = random_tokens(MAX_MODEL_LEN)
    paged = PagedSequences(loaded.model, 1)
    start = 0
    for size in (7, 1, 16, 4, 1, 1, 3, 12, 2, 1):
        paged.step({0: tokens[start : start + size]})
        start += size
    assert start == MAX_MODEL_LEN
    assert_same(paged.all_logits(0), oracle_logits(loaded.oracle, tokens))


def test_sequences_in_one_batch_do_not_disturb_each_other(loaded: Loaded) -> None:
    # All of one length, because the dynamic type of `transformers` scales by the length of the sequence.
    sequences = [random_tokens(MAX_MODEL_LEN, seed) for seed in range(4)]
    taken = [0] * 4
    paged = PagedSequences(loaded.model, 4)
    plans = [{0: 16}, {1: 5, 0: 1}, {2: 1, 0: 1, 1: 13, 3: 7}, {3: 1, 1: 1, 0: 1}, {2: 40, 0: 9, 3: 1}]
    plans += [dict.fromkeys((3, 1), MAX_MODEL_LEN), {0: 19, 2: 6}, {2: 1, 0: 1}]
    for plan in plans:
        chunks = {
            index: sequences[index][taken[index] : taken[index] + count] for index, count in plan.items()
        }
        paged.step(chunks)
        for index, tokens in chunks.items():
            taken[index] += len(tokens)
    assert taken == [MAX_MODEL_LEN] * 4
    for index, tokens in enumerate(sequences):
        assert_same(paged.all_logits(index), oracle_logits(loaded.oracle, tokens))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["llama-yarn", "mistral-sliding", "qwen2", "qwen3"])
def test_half_precision_errs_no_more_than_transformers_does(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    family, config = MODELS[name]
    model_class = type(tiny_model(tmp_path, family, **config))
    oracle = model_class.from_pretrained(tmp_path, dtype=dtype, attn_implementation="eager")
    tokens = random_tokens(MAX_MODEL_LEN)
    theirs = oracle_logits(oracle, tokens)
    # The same rounded weights, computed with in float32.
    exact = oracle_logits(oracle.float(), tokens)
    paged = PagedSequences(load(tmp_path, dtype), 1)
    paged.step({0: tokens[:30]})
    for token in tokens[30:]:
        paged.step({0: [token]})

    ours = (paged.all_logits(0) - exact).square().mean().sqrt()
    assert ours <= 1.2 * (theirs - exact).square().mean().sqrt()
