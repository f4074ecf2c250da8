"""Text to token ids, off the event loop."""

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

import tokenizers

from common.detokenizer import Detokenizer, TokenDecoder, UnsupportedDecoderError
from common.model_files import ModelFiles, ModelFilesError

_THREADS: Final = 2

T = TypeVar("T")


class Tokenizer:
    """A model's tokenizer.json.

    Attributes:
        vocab_size: One more than the greatest token id.
        eos_token_ids: Sorted. The model's, and the token with which its chat template ends a turn.
        special_tokens: What the tokenizer takes for special tokens wherever a text has it.
    """

    def __init__(self, files: ModelFiles) -> None:
        """Loads it.

        Raises:
            ModelFilesError: tokenizer.json is missing, broken or decodes in a way that we don't know.
        """
        path = files.folder / "tokenizer.json"
        if not path.is_file():
            raise ModelFilesError(f"{path}: no such file")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
            self._decoder = TokenDecoder(self._tokenizer)
        except UnsupportedDecoderError as error:
            raise ModelFilesError(f"{path}: {error}") from error
        except Exception as error:  # tokenizers raises bare Exception
            raise ModelFilesError(f"{path}: not a tokenizer: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="tokenizer")
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.special_tokens = frozenset(self._decoder.special.values())
        eos = self._tokenizer.token_to_id(files.special_tokens.get("eos_token", ""))
        self.eos_token_ids = tuple(sorted(files.eos_token_ids | ({eos} if eos is not None else set())))

    def encode(self, *texts: str, add_special_tokens: bool) -> list[int]:
        """Token ids of `texts`, each by itself; seconds for megabytes, without holding the GIL."""
        # `encode` holds the GIL throughout (0.6 s for 1 MB); the batch form releases it.
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [token_id for encoding in encodings for token_id in encoding.ids]

    async def run(self, function: Callable[[], T]) -> T:
        """Runs `function` in the tokenizer's thread pool."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, function)

    def detokenizer(self, shown: frozenset[str] = frozenset()) -> Detokenizer:
        """A new one, at the start of a text. Special tokens have no text, but for those that are `shown`."""
        return Detokenizer(self._decoder, shown)

    def token_bytes(self, token_id: int) -> bytes:
        """What one token adds to a text; of a special token, which adds nothing, its name."""
        if data := self._decoder.bytes_of(token_id):
            return data
        return (self._tokenizer.id_to_token(token_id) or "").encode()

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of `token_ids`, special tokens left out, exactly as a stream of them gives it."""
        detokenizer = self.detokenizer()
        return "".join(map(detokenizer.push, token_ids)) + detokenizer.flush()
