"""Ranks in processes of their own: together they are the whole model."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shard.model_config import ModelError, load_model_config
from shard.parallel import Partition, RankGroup, RankLostError, Rendezvous
from tests.oracle import tiny_model
from tests.shard.sum_process import part

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-biases-odd-vocabulary": (
        "Llama",
        {"attention_bias": True, "mlp_bias": True, "vocab_size": 257, "tie_word_embeddings": True},
    ),
    "llama-one-kv-head": ("Llama", {"num_key_value_heads": 1}),
    "mistral-sliding": ("Mistral", {"sliding_window": 9}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2-moe": (
        "Qwen2Moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
            "mlp_only_layers": [1],
        },
    ),
}


def start(rank: int, world_size: int, rendezvous: str, folders: list[Path]) -> "subprocess.Popen[str]":
    return run("rank_process", rank, world_size, rendezvous, *map(str, folders))


def run(module: str, rank: int, world_size: int, *words: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", f"tests.shard.{module}", str(rank), str(world_size), *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def results(process: "subprocess.Popen[str]") -> list[dict[str, Any]]:
    assert process.stdout
    lines = process.stdout.read().splitlines()
    assert process.wait() == 0
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """By model: what the whole one makes of the commands, then what ranks 0 and 1 of two do."""
    folders = []
    for name, (family, config) in MODELS.items():
        folders.append(tmp_path_factory.mktemp(name))
        tiny_model(folders[-1], family, **config)
    alone, first = start(0, 1, "", folders), start(0, 2, "", folders)
    assert first.stdout
    second = start(1, 2, first.stdout.readline().strip(), folders)
    found = zip(*map(results, (alone, first, second)), strict=True)
    return dict(zip(MODELS, map(list, found), strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_give_the_tokens_of_one(name: str, served: dict[str, list[dict[str, Any]]]) -> None:
    alone, first, _ = served[name]
    assert len(alone["tokens"][-1]) == 3
    assert first["tokens"] == alone["tokens"]
    assert len(alone["prompt_logprobs"]) == 18
    assert first["prompt_logprobs"] == pytest.approx(alone["prompt_logprobs"], abs=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_rank_0_alone_samples(name: str, served: dict[str, list[dict[str, Any]]]) -> None:
    assert not any(served[name][2]["tokens"])


@pytest.mark.parametrize("name", MODELS)
def test_all_ranks_have_the_same_block_tables(name: str, served: dict[str, list[dict[str, Any]]]) -> None:
    alone, first, second = served[name]
    assert first["tables"] == second["tables"] == alone["tables"]


def test_a_rank_holds_half_of_the_weights_and_of_the_blocks(served: dict[str, list[dict[str, Any]]]) -> None:
    alone, first, second = served["llama"]
    for rank in (first, second):
        assert rank["kv_bytes_per_token"] * 2 == alone["kv_bytes_per_token"]
        # The norms are on both.
        assert rank["weight_bytes"] < 0.51 * alone["weight_bytes"]


def test_kv_heads_are_repeated_where_ranks_outnumber_them(served: dict[str, list[dict[str, Any]]]) -> None:
    alone, first, second = served["llama-one-kv-head"]
    assert first["kv_bytes_per_token"] == second["kv_bytes_per_token"] == alone["kv_bytes_per_token"]


@pytest.mark.parametrize(
    ("world_size", "config", "said"),
    [
        (3, {}, "--tensor-parallel-size 3 doesn't divide num_attention_heads 4"),
        (4, {"intermediate_size": 98}, "--tensor-parallel-size 4 doesn't divide intermediate_size 98"),
        (
            4,
            {"hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 6},
            "--tensor-parallel-size 4 neither divides num_key_value_heads 6 nor is a multiple of it",
        ),
    ],
)
def test_a_model_that_cant_be_divided_is_refused(
    world_size: int, config: dict[str, Any], said: str, tmp_path: Path
) -> None:
    tiny_model(tmp_path, **config)
    with pytest.raises(ModelError, match=said):
        Partition(0, world_size).of(load_model_config(tmp_path))


def test_sums_are_in_the_order_of_the_ranks() -> None:
    """So a number's sum doesn't depend on where it stands, nor on its batch."""
    first = run("sum_process", 0, 3, "")
    assert first.stdout
    address = first.stdout.readline().strip()
    others = [run("sum_process", rank, 3, address) for rank in (1, 2)]

    found = [process.communicate()[0].strip() for process in (first, *others)]

    expected = (part(0) + part(1)) + part(2)
    assert not expected.equal(part(0) + (part(1) + part(2)))
    assert found == [expected.numpy().tobytes().hex()] * 3


@pytest.fixture
def group() -> RankGroup:
    """The first of two ranks."""
    return RankGroup(Partition(0, 2), torch.device("cpu"), 1.0, "model")


def test_a_rank_that_never_comes_is_named(group: RankGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shard.parallel.RENDEZVOUS_TIMEOUT_S", 0.1)
    rendezvous = Rendezvous("127.0.0.1")

    with pytest.raises(RankLostError, match=rf"^rank 1 didn't come to {rendezvous.address} within 0.1 s: "):
        group.join(rendezvous.address, 1, "")


def test_a_rendezvous_where_nobody_is_is_named(group: RankGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shard.parallel.RENDEZVOUS_TIMEOUT_S", 0.1)

    with pytest.raises(
        RankLostError, match=r"^rank 0 can't reach rank 0 at 127\.0\.0\.1:1, its --rendezvous-host"
    ):
        group.join("127.0.0.1:1", 1, "")


def test_what_torch_says_of_a_lost_rank_is_one_line_without_its_own_places(
    group: RankGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broadcast(*_: object) -> None:
        raise RuntimeError("[/built/at/pair.cc:81] Timed out waiting 10 ms\nframe #1: a.so")

    monkeypatch.setattr(dist, "broadcast", broadcast)

    with pytest.raises(RankLostError, match=r"^another rank is gone or hangs: Timed out waiting 10 ms$"):
        group.broadcast(torch.zeros(1))
