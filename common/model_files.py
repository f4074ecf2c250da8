"""What router and scheduler read of a Hugging Face model folder."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

# Names that tokenizer_config.json gives to special tokens, and chat templates call them by.
SPECIAL_TOKENS: Final = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class ModelFilesError(ValueError):
    """A file of the model folder is missing or broken; the message names it."""


@dataclass(frozen=True)
class ModelFiles:
    """The parts of a model folder that text handling needs."""

    folder: Path
    # As named in tokenizer_config.json, for chat templates: `eos_token` → `</s>`.
    special_tokens: Mapping[str, str]
    # From generation_config.json, else config.json.
    eos_token_ids: frozenset[int]
    chat_template: str | None
    # The file that `chat_template` came from.
    chat_template_file: Path
    # config.json as it is.
    config: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path) -> "ModelFiles":
        """Reads `folder`.

        Raises:
            ModelFilesError: a file is missing or is not what it should be.
        """
        if not folder.is_dir():
            raise ModelFilesError(f"{folder}: no such folder")
        config = _read_json(folder / "config.json")
        generation = _read_json(folder / "generation_config.json", required=False)
        tokenizer = _read_json(folder / "tokenizer_config.json", required=False)
        special = {name: tokenizer[name] for name in SPECIAL_TOKENS if tokenizer.get(name)}
        eos_source, eos = "generation_config.json", generation.get("eos_token_id")
        if eos is None:
            eos_source, eos = "config.json", config.get("eos_token_id")
        template, template_file = _chat_template(folder, tokenizer)
        return cls(
            folder,
            {name: token["content"] if isinstance(token, dict) else token for name, token in special.items()},
            _token_ids(eos, folder / eos_source),
            template,
            template_file,
            config,
        )


def _read_json(path: Path, required: bool = True) -> dict[str, Any]:
    text = _read_text(path, required)
    try:
        document = json.loads(text) if text is not None else {}
    except json.JSONDecodeError as error:
        raise ModelFilesError(f"{path}: not JSON: {error}") from error
    if not isinstance(document, dict):
        raise ModelFilesError(f"{path}: not a JSON object")
    return document


def _read_text(path: Path, required: bool) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        if required:
            raise ModelFilesError(f"{path}: no such file") from None
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFilesError(f"{path}: can't be read: {error}") from error


def _token_ids(value: Any, path: Path) -> frozenset[int]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(item, int) and item >= 0 for item in ids):
        raise ModelFilesError(f"{path}: eos_token_id {value!r} is not a token id or a list of them")
    return frozenset(ids)


def _chat_template(folder: Path, tokenizer_config: Mapping[str, Any]) -> tuple[str | None, Path]:
    path = folder / "chat_template.jinja"
    if (source := _read_text(path, required=False)) is not None:
        return source, path
    path = folder / "tokenizer_config.json"
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        named = {str(item.get("name")): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise ModelFilesError(f"{path}: chat_template is neither a string nor a list with a 'default'")
    return template, path
