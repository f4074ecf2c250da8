"""Loading safetensors: what comes out, what is refused, and what the revision tells apart."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shard.model_config import ModelError, load_model_config
from shard.models import DecoderModel
from shard.weights import load_model, model_revision
from tests.oracle import tiny_model

CPU = torch.device("cpu")
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    tiny_model(folder, attention_bias=True)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "model")


@pytest.fixture
def sharded(folder: Path) -> Path:
    """The same model in two files with an index."""
    tensors = sorted(load_file(folder / SINGLE).items())
    weight_map: dict[str, str] = {}
    for name, part in {"a.safetensors": tensors[:9], "b.safetensors": tensors[9:]}.items():
        save_file(dict(part), folder / name)
        weight_map |= {tensor: name for tensor, _ in part}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    (folder / SINGLE).unlink()
    return folder


def load(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    max_model_len: int = 64,
    progress: Callable[[int, int], None] | None = None,
) -> DecoderModel:
    return load_model(folder, load_model_config(folder), dtype, CPU, max_model_len, progress)


def tensors(model: DecoderModel) -> dict[str, Tensor]:
    return {placement.name: placement.tensor for placement in model.placements()}


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Rewrites the single file after `change` had its way with the tensors."""
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE)


def edit_index(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def test_every_tensor_lands_under_its_name(folder: Path) -> None:
    expected = load_file(folder / SINGLE)
    loaded = tensors(load(folder))
    assert loaded.keys() == expected.keys()
    for name, tensor in loaded.items():
        assert tensor.equal(expected[name]), name


def test_two_files_load_like_one(saved: Path, sharded: Path) -> None:
    expected = tensors(load(saved))
    for name, tensor in tensors(load(sharded)).items():
        assert tensor.equal(expected[name]), name


def test_files_may_be_links_as_in_hugging_faces_cache(sharded: Path, tmp_path: Path) -> None:
    blob = tmp_path / "blob"
    (sharded / "a.safetensors").rename(blob)
    (sharded / "a.safetensors").symlink_to(blob)
    assert load(sharded).norm.isfinite().all()


def test_converts_to_the_served_dtype(folder: Path) -> None:
    expected = load_file(folder / SINGLE)
    for name, tensor in tensors(load(folder, torch.bfloat16)).items():
        assert tensor.equal(expected[name].bfloat16()), name


def test_progress_counts_up_to_all_bytes(sharded: Path) -> None:
    calls: list[tuple[int, int]] = []
    load(sharded, progress=lambda done, total: calls.append((done, total)))

    expected = sum(
        tensor.nbytes for file in sharded.glob("*.safetensors") for tensor in load_file(file).values()
    )
    done = [call[0] for call in calls]
    assert {call[1] for call in calls} == {expected}
    assert done == sorted(set(done))
    assert done[-1] == expected


def test_ignores_rotary_frequencies_and_the_head_of_a_tied_model(tmp_path: Path) -> None:
    tiny_model(tmp_path, tie_word_embeddings=True)
    harmless = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
        "lm_head.weight": torch.ones(256, 64),
    }
    edit(tmp_path, lambda tensors: tensors.update(harmless))
    model = load(tmp_path)
    assert model.head is model.embedding
    assert not model.head.equal(harmless["lm_head.weight"])


@pytest.mark.parametrize(
    "name", ["model.layers.3.mlp.up_proj.weight", "model.layers.0.self_attn.o_proj.scale"]
)
def test_refuses_a_tensor_that_the_config_has_no_place_for(name: str, folder: Path) -> None:
    edit(folder, lambda tensors: tensors.update({name: torch.ones(1)}))
    with pytest.raises(ModelError, match=rf"model\.safetensors: tensor {name} is unexpected"):
        load(folder)


def test_refuses_a_missing_tensor(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.pop("model.layers.1.self_attn.v_proj.bias"))
    with pytest.raises(ModelError, match=r"tensor model\.layers\.1\.self_attn\.v_proj\.bias is missing"):
        load(folder)


def test_refuses_a_wrong_shape(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(63)}))
    with pytest.raises(ModelError, match=r"tensor model\.norm\.weight has shape \[63\]; .* calls for \[64\]"):
        load(folder)


def test_refuses_integers_for_weights(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}))
    with pytest.raises(
        ModelError, match=r"tensor model\.norm\.weight has dtype I8; supported: F32, BF16, F16"
    ):
        load(folder)


def test_refuses_a_file_cut_short_in_its_data(folder: Path) -> None:
    content = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(content[:-10])
    with pytest.raises(ModelError, match=r"model\.safetensors: cut short: .* up to tensor \S+"):
        load(folder)


@pytest.mark.parametrize("length", [0, 5, 100])
def test_refuses_a_file_cut_short_in_its_header(length: int, folder: Path) -> None:
    content = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(content[:length])
    with pytest.raises(ModelError, match=r"model\.safetensors: not a safetensors file, or cut short"):
        load(folder)


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"{broken",
        b'{"x": {"dtype": "F32", "shape": [1]}}',
        b'{"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]}}',
        b'{"x": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}',
        b'{"x": {"dtype": "F32", "shape": [1], "data_offsets": [-8, 0]}}',
    ],
)
def test_refuses_a_malformed_header(header: bytes, folder: Path) -> None:
    (folder / SINGLE).write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
    with pytest.raises(ModelError, match=r"model\.safetensors: .*header is malformed"):
        load(folder)


def test_refuses_offsets_that_do_not_fit_their_tensor(folder: Path) -> None:
    content = (folder / SINGLE).read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    header["model.norm.weight"]["data_offsets"][1] -= 4
    rewritten = json.dumps(header).encode()
    (folder / SINGLE).write_bytes(struct.pack("<Q", len(rewritten)) + rewritten + content[8 + length :])
    with pytest.raises(ModelError, match=r"model\.safetensors: can't be read: "):
        load(folder)


def test_refuses_pickles_and_says_why(folder: Path) -> None:
    (folder / SINGLE).rename(folder / "pytorch_model.bin")
    with pytest.raises(
        ModelError, match=r"neither .*pytorch_model\.bin is a pickle.*convert it to safetensors"
    ):
        load(folder)


def test_refuses_a_folder_without_weights(folder: Path) -> None:
    (folder / SINGLE).unlink()
    with pytest.raises(
        ModelError, match=r"holds neither model\.safetensors nor model\.safetensors\.index\.json$"
    ):
        load(folder)


def test_refuses_a_missing_file_of_several(sharded: Path) -> None:
    (sharded / "b.safetensors").unlink()
    with pytest.raises(ModelError, match=r"b\.safetensors: no such file"):
        load(sharded)


def test_refuses_an_index_that_misplaces_a_tensor(sharded: Path) -> None:
    edit_index(sharded, lambda weights: weights.update({"model.norm.weight": "a.safetensors"}))
    with pytest.raises(ModelError, match=r"a\.safetensors: tensor model\.norm\.weight is missing, though"):
        load(sharded)


@pytest.mark.parametrize(
    "escape", ["../b.safetensors", "/etc/b.safetensors", "..", "", "sub/b.safetensors", "b.bin"]
)
def test_refuses_an_index_that_leads_elsewhere(escape: str, sharded: Path) -> None:
    shutil.copy(sharded / "b.safetensors", sharded.parent)
    edit_index(sharded, lambda weights: weights.update({"model.norm.weight": escape}))
    with pytest.raises(ModelError, match=r"index\.json: weight_map names .* file of this folder"):
        load(sharded)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {"x": 1}}'])
def test_refuses_a_broken_index(text: str, sharded: Path) -> None:
    (sharded / INDEX).write_text(text)
    with pytest.raises(ModelError, match=r"index\.json: must be a JSON object with weight_map"):
        load(sharded)


@pytest.mark.parametrize("length", [0, 129])
def test_refuses_a_length_that_the_model_does_not_support(length: int, folder: Path) -> None:
    with pytest.raises(ModelError, match=f"max_model_len is {length}; the model supports 1 to 128 tokens"):
        load(folder, max_model_len=length)
    assert len(load(folder, max_model_len=128).cos) == 128


def test_revision_is_that_of_the_content_not_of_the_place(saved: Path, folder: Path) -> None:
    assert model_revision(folder) == model_revision(saved)


def double(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda tensors: tensors[name].mul_(2)


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: edit(folder, double("model.layers.2.mlp.down_proj.weight")),
        lambda folder: edit(folder, double("model.norm.weight")),
        lambda folder: edit(folder, lambda tensors: tensors.update(extra=torch.ones(1))),
        lambda folder: (folder / "config.json").write_text("{}"),
        lambda folder: (folder / "generation_config.json").write_text('{"eos_token_id": 7}'),
        lambda folder: (folder / "generation_config.json").unlink(),
    ],
    ids=["one-projection", "one-norm", "extra-tensor", "config", "generation-config", "no-generation-config"],
)
def test_revision_changes_with_the_content(change: Callable[[Path], object], folder: Path) -> None:
    before = model_revision(folder)
    change(folder)
    assert model_revision(folder) != before


def test_revision_refuses_what_loading_refuses(folder: Path) -> None:
    (folder / SINGLE).unlink()
    with pytest.raises(ModelError, match="holds neither"):
        model_revision(folder)
