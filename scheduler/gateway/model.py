"""What a gateway is told of the model, from its folder."""

import io
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from common.model_files import ModelFiles
from common.tokenizer import Tokenizer

# A gateway on another machine tokenises with these.
_TOKENIZER_FILES: Final = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


@dataclass(frozen=True)
class ServedModel:
    """The model as a gateway knows it."""

    name: str
    folder: Path
    tokenizer: Tokenizer
    model_type: str
    architectures: tuple[str, ...]

    @classmethod
    def read(cls, folder: Path, name: str | None) -> "ServedModel":
        """Reads `folder`, whose name is the model's unless it has another.

        Raises:
            ModelFilesError: a file is missing or is not what it should be.
        """
        files = ModelFiles.read(folder)
        return cls(
            name or folder.resolve().name,
            folder.resolve(),
            Tokenizer(files),
            str(files.config.get("model_type") or ""),
            tuple(map(str, files.config.get("architectures") or ())),
        )

    def tokenizer_archive(self) -> bytes:
        """A zip file of what tokenising takes."""
        archive = io.BytesIO()
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as files:
            for path in filter(Path.is_file, (self.folder / name for name in _TOKENIZER_FILES)):
                files.write(path, path.name)
        return archive.getvalue()
