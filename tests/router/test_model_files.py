import asyncio
import json
import time
from pathlib import Path

import pytest

from common.model_files import ModelFiles, ModelFilesError
from common.tokenizer import Tokenizer
from router.chat_template import ChatTemplate
from tests.router.models import write_model


def test_reads_special_tokens_eos_ids_and_template(model_folder: Path) -> None:
    files = ModelFiles.read(model_folder)
    assert files.special_tokens == {"bos_token": "<s>", "eos_token": "<|im_end|>"}
    assert files.eos_token_ids == {1}
    assert files.chat_template is not None
    assert "im_start" in files.chat_template


def test_eos_ids_fall_back_to_config_and_join_the_tokenizers_own(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    (folder / "generation_config.json").unlink()
    files = ModelFiles.read(folder)
    assert files.eos_token_ids == {0}
    assert Tokenizer(files).eos_token_ids == (0, 1)


def test_template_file_wins_over_tokenizer_config(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    (folder / "chat_template.jinja").write_text("from the file")
    assert ModelFiles.read(folder).chat_template == "from the file"


def test_template_list_has_a_default(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    templates = [{"name": "tool", "template": "no"}, {"name": "default", "template": "yes"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    assert ModelFiles.read(folder).chat_template == "yes"


def load(folder: Path) -> tuple[ChatTemplate, Tokenizer]:
    files = ModelFiles.read(folder)
    return ChatTemplate(files), Tokenizer(files)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", None, "config.json: no such file"),
        ("config.json", "{", "config.json: not JSON"),
        ("config.json", "[]", "config.json: not a JSON object"),
        ("generation_config.json", '{"eos_token_id": "x"}', "generation_config.json: eos_token_id 'x'"),
        ("tokenizer_config.json", '{"chat_template": 1}', "tokenizer_config.json: chat_template"),
        ("chat_template.jinja", "{% if %}", "chat_template.jinja: chat template"),
        ("tokenizer.json", None, "tokenizer.json: no such file"),
        ("tokenizer.json", "{}", "tokenizer.json: not a tokenizer"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    path = write_model(tmp_path / "m") / name
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(ModelFilesError, match=message):
        load(path.parent)


def test_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match="nowhere: no such folder"):
        ModelFiles.read(tmp_path / "nowhere")


def test_ids_equal_those_of_the_library_and_decode_gives_the_text_back(model_folder: Path) -> None:
    tokenizer = Tokenizer(ModelFiles.read(model_folder))
    text = "quick 你好 🙂<|im_end|>"
    ids = tokenizer.encode(text, add_special_tokens=True)
    assert ids[-1] == 1
    assert tokenizer.decode(ids) == "quick 你好 🙂"


def test_only_texts_get_the_special_tokens_of_the_post_processor(tmp_path: Path) -> None:
    tokenizer = Tokenizer(ModelFiles.read(write_model(tmp_path / "m", bos=True)))
    plain = tokenizer.encode("fox", add_special_tokens=False)
    assert tokenizer.encode("fox", add_special_tokens=True) == [2, *plain]


async def test_long_text_leaves_the_event_loop_free(model_folder: Path) -> None:
    tokenizer = Tokenizer(ModelFiles.read(model_folder))
    long = "the quick brown fox " * 20_000
    start = last = time.monotonic()
    longest_pause = 0.0
    encoding = asyncio.ensure_future(tokenizer.run(lambda: tokenizer.encode(long, add_special_tokens=False)))
    while not encoding.done():
        await asyncio.sleep(0)
        now = time.monotonic()
        longest_pause, last = max(longest_pause, now - last), now
    assert longest_pause < (last - start) / 2
