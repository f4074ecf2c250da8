"""Log-probabilities in the two shapes that OpenAI gives them."""

from collections.abc import Iterable
from typing import Any, Final

from common.tokenizer import Tokenizer
from pagoda.v1.sampling_pb2 import PositionLogprobs, TokenLogprob

# JSON has no infinity; OpenAI says this of what can't be.
_IMPOSSIBLE: Final = -9999.0


def token_text(data: bytes) -> str:
    """One token as a string; one that holds part of a character as OpenAI writes its bytes."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class CompletionLogprobs:
    """Of one choice of a completion; knows where in the text each token begins."""

    def __init__(self, tokenizer: Tokenizer, start: int = 0) -> None:
        """The first token begins `start` characters into the text."""
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer()
        self._offset = start

    def of(self, token_ids: Iterable[int], positions: Iterable[PositionLogprobs]) -> dict[str, list[Any]]:
        """One entry per token; null where the position holds nothing, as that of a prompt's first."""
        tokens: list[str] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for token_id, position in zip(token_ids, positions, strict=True):
            tokens.append(self._text(token_id))
            offsets.append(self._offset)
            self._offset += len(self._detokenizer.push(token_id))
            if not position.HasField("chosen"):
                values.append(None)
                tops.append(None)
                continue
            values.append(_value(position.chosen))
            likeliest = {self._text(one.token_id): _value(one) for one in (*position.top, position.chosen)}
            tops.append(likeliest)
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}

    def _text(self, token_id: int) -> str:
        return token_text(self._tokenizer.token_bytes(token_id))


def chat_logprobs(tokenizer: Tokenizer, positions: Iterable[PositionLogprobs]) -> dict[str, Any]:
    """Of one choice of a chat."""

    def entry(one: TokenLogprob) -> dict[str, Any]:
        data = tokenizer.token_bytes(one.token_id)
        return {"token": token_text(data), "logprob": _value(one), "bytes": list(data)}

    content = [
        {**entry(position.chosen), "top_logprobs": [entry(one) for one in position.top]}
        for position in positions
    ]
    return {"content": content, "refusal": None}


def mean_logprob(positions: Iterable[PositionLogprobs]) -> float:
    """Of the chosen tokens: what `best_of` ranks outputs by."""
    values = [_value(position.chosen) for position in positions]
    return sum(values) / max(len(values), 1)


def _value(one: TokenLogprob) -> float:
    return max(one.logprob, _IMPOSSIBLE)
