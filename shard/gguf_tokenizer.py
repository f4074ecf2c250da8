"""The tokenizer that a GGUF file's metadata describes, as Hugging Face's `tokenizers` has it.

GGUF names how text is cut before merging (`tokenizer.ggml.pre`) but doesn't hold the rule. The rules here are
those of the models' own tokenizer.json, which llama.cpp's `llama-vocab.cpp` follows.
"""

from dataclasses import dataclass
from typing import Any

from gguf import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from shard.gguf_file import Metadata
from shard.model_config import ModelError

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class _ByteLevelKind:
    """How one family of byte-level tokenizers differs from GPT-2's."""

    splits: tuple[str, ...] = (_GPT2,)
    """Each cuts what the ones before it left."""
    nfc: bool = False
    whole_words: bool = False
    """Whether a word that is itself a token is taken without merging."""
    add_bos: bool = False
    """Where the file doesn't say."""


_DIGIT_BY_DIGIT = _ByteLevelKind((r"\p{N}", _GPT2))
_LLAMA3_KIND = _ByteLevelKind((_LLAMA3,), whole_words=True, add_bos=True)
_BYTE_LEVEL_KINDS = {
    "default": _ByteLevelKind((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": _ByteLevelKind(),
    "smollm": _DIGIT_BY_DIGIT,
    "starcoder": _DIGIT_BY_DIGIT,
    "refact": _DIGIT_BY_DIGIT,
    "llama-bpe": _LLAMA3_KIND,
    "llama-v3": _LLAMA3_KIND,
    "llama3": _LLAMA3_KIND,
    "qwen2": _ByteLevelKind((_QWEN2,), nfc=True),
    "deepseek-r1-qwen": _ByteLevelKind((_QWEN2,), add_bos=True),
    "tekken": _ByteLevelKind((_TEKKEN,), whole_words=True, add_bos=True),
}
_SPACE = "▁"


@dataclass(frozen=True)
class SpecialTokens:
    """Token ids with a meaning. `end` are those that end a text: end of sequence, of turn, of message."""

    bos: int | None
    unknown: int | None
    padding: int | None
    end: tuple[int, ...]


@dataclass(frozen=True)
class ImportedTokenizer:
    """What becomes tokenizer.json, tokenizer_config.json and chat_template.jinja."""

    tokenizer: Tokenizer
    config: dict[str, Any]
    chat_template: str | None
    special: SpecialTokens


def build_tokenizer(metadata: Metadata, context_length: int) -> ImportedTokenizer:
    """Builds the tokenizer of the kinds `gpt2` (byte-level BPE) and `llama` (SentencePiece BPE).

    Raises `ModelError` for another kind, an unknown pre-tokenizer, or a vocabulary that makes no sense.
    """
    tokens = metadata.texts("tokenizer.ggml.tokens")
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) < len(tokens):
        twice = next(token for index, token in enumerate(tokens) if vocab[token] != index)
        raise ModelError(f"{metadata.source}: tokenizer.ggml.tokens holds {twice!r} twice")
    types = [TokenType.NORMAL] * len(tokens)
    if "tokenizer.ggml.token_type" in metadata:
        types = metadata.numbers("tokenizer.ggml.token_type", len(tokens))
    special = _special_tokens(metadata, len(tokens))
    model = metadata.text("tokenizer.ggml.model")
    if model not in ("gpt2", "llama"):
        raise metadata.error("tokenizer.ggml.model", "supported: gpt2, llama")

    try:
        if model == "gpt2":
            tokenizer = _byte_level(metadata, vocab)
        else:
            tokenizer = _sentencepiece(metadata, vocab, types, tokens[special.unknown or 0])
        _add_tokens(tokenizer, tokens, types)
        _add_post_processor(tokenizer, metadata, model, tokens, special)
    except ModelError:
        raise
    except Exception as error:  # tokenizers raises bare Exception
        raise ModelError(f"{metadata.source}: its tokenizer makes no sense: {error}") from None

    named = {
        "bos_token": special.bos,
        "eos_token": special.end[0] if special.end else None,
        "unk_token": special.unknown,
        "pad_token": special.padding,
    }
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context_length,
        "clean_up_tokenization_spaces": False,
        **{name: tokens[token] for name, token in named.items() if token is not None},
    }
    key = "tokenizer.chat_template"
    return ImportedTokenizer(tokenizer, config, metadata.text(key) if key in metadata else None, special)


def _special_tokens(metadata: Metadata, vocab_size: int) -> SpecialTokens:
    def token(name: str) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        if key not in metadata:
            return None
        return metadata.integer(key, low=0, high=vocab_size - 1)

    ends = (token(name) for name in ("eos", "eot", "eom"))
    return SpecialTokens(
        token("bos"),
        token("unknown"),
        token("padding"),
        tuple(dict.fromkeys(end for end in ends if end is not None)),
    )


def _byte_level(metadata: Metadata, vocab: dict[str, int]) -> Tokenizer:
    kind = _byte_level_kind(metadata)
    pairs = (merge.partition(" ") for merge in metadata.texts("tokenizer.ggml.merges"))
    merges = [(left, right) for left, _, right in pairs]
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges, ignore_merges=kind.whole_words))
    if kind.nfc:
        tokenizer.normalizer = normalizers.NFC()
    prefix = metadata.boolean("tokenizer.ggml.add_space_prefix", False)
    splits: list[Any] = [pre_tokenizers.Split(Regex(split), "isolated") for split in kind.splits]
    # The space must come before the first split, and ByteLevel, which adds it, comes after the last.
    if prefix:
        splits.insert(0, pre_tokenizers.Metaspace(" ", prepend_scheme="first", split=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _byte_level_kind(metadata: Metadata) -> _ByteLevelKind:
    key = "tokenizer.ggml.pre"
    name = metadata.text(key, "default")
    if name not in _BYTE_LEVEL_KINDS:
        raise metadata.error(key, f"supported: {', '.join(_BYTE_LEVEL_KINDS)}")
    return _BYTE_LEVEL_KINDS[name]


def _sentencepiece(metadata: Metadata, vocab: dict[str, int], types: list[int], unknown: str) -> Tokenizer:
    scores = metadata.numbers("tokenizer.ggml.scores", len(vocab))
    normal = {token: scores[i] for token, i in vocab.items() if types[i] == TokenType.NORMAL}
    tokenizer = Tokenizer(
        BPE(
            vocab=vocab,
            merges=_merges(normal, vocab),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = metadata.boolean("tokenizer.ggml.add_space_prefix", True)
    # As in the tokenizer.json of Llama 2 and Mistral 7B, and in llama.cpp: a space goes before the text and
    # before what follows a special token. `transformers` itself skips it where a space is there already,
    # which loses one, and after special tokens, where these models' chats have it.
    replace = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE)] * prefix + [replace])
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps + [decoders.Strip(" ", left=1)] * prefix)
    return tokenizer


def _merges(scores: dict[str, float], vocab: dict[str, int]) -> list[tuple[str, str]]:
    """SentencePiece joins the neighbours that give the best-scored token: a merge for each way to make it.

    In the order that `transformers` puts them in: best score first, then the longest left part.
    """
    found: list[tuple[float, int, int, str, str]] = []
    for token, score in scores.items():
        cuts = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        pairs = [pair for pair in cuts if pair[0] in scores and pair[1] in scores]
        pairs.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        found.extend((score, len(left), len(right), left, right) for left, right in pairs)
    found.sort(key=lambda merge: merge[:3], reverse=True)
    return [merge[3:] for merge in found]


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Control tokens are special: no text holds them. User-defined ones are only never cut. Ids stay."""

    def added(kinds: tuple[TokenType, ...], special: bool) -> list[AddedToken]:
        named = (token for token, kind in zip(tokens, types, strict=True) if kind in kinds)
        return [AddedToken(token, normalized=False, special=special) for token in named]

    tokenizer.add_special_tokens(added((TokenType.CONTROL, TokenType.UNKNOWN), special=True))
    tokenizer.add_tokens(added((TokenType.USER_DEFINED,), special=False))


def _add_post_processor(
    tokenizer: Tokenizer, metadata: Metadata, model: str, tokens: list[str], special: SpecialTokens
) -> None:
    default = True if model == "llama" else _byte_level_kind(metadata).add_bos
    wanted = {
        "bos": (metadata.boolean("tokenizer.ggml.add_bos_token", default), special.bos),
        "eos": (metadata.boolean("tokenizer.ggml.add_eos_token", False), (special.end or (None,))[0]),
    }
    around: dict[str, list[str]] = {"bos": [], "eos": []}
    used = []
    for name, (add, token) in wanted.items():
        if not add:
            continue
        if token is None:
            if f"tokenizer.ggml.add_{name}_token" in metadata:
                raise metadata.error(f"tokenizer.ggml.{name}_token_id", f"add_{name}_token calls for it")
            continue
        around[name] = [tokens[token]]
        used.append((tokens[token], token))
    if used:
        single = [*around["bos"], "$A", *around["eos"]]
        second = [f"{piece}:1" for piece in (*around["bos"], "$B", *around["eos"])]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single, pair=single + second, special_tokens=used
        )
