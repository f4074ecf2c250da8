"""What may be asked of sampling and of an output's end, by whichever face a request comes."""

import secrets
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pagoda.v1.sampling_pb2 import SamplingParams

MAX_LOGIT_BIASES: Final = 1024
MAX_LOGPROBS: Final = 20
# Of one prompt: tokens times (1 + how many likeliest ones). About 4 MiB on the wire.
MAX_PROMPT_LOGPROBS: Final = 2**18
MAX_OUTPUTS: Final = 128
MAX_STOP_STRINGS: Final = 16
MAX_STOP_STRING_BYTES: Final = 1024
MAX_STOP_TOKENS: Final = 128


class FieldError(ValueError):
    """A field isn't as it may be; the message names the value and the limit.

    Args:
        field: Its path, as the client knows it.
        message: Without the field.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True)
class Range:
    """The numbers that a field takes, from `low` to `high`, and the one that it has when it is left out."""

    default: float
    low: float
    high: float
    low_included: bool = True

    def check(self, value: float, field: str) -> None:
        """Raises `FieldError` on a value outside."""
        # As the wire has both: 0.01 is a little more than the float32 that stands for it.
        least, most = _float32(self.low), _float32(self.high)
        above = value >= least if self.low_included else value > least
        if not (above and value <= most):  # NaN is neither
            low = f"at least {self.low:g}" if self.low_included else f"greater than {self.low:g}"
            raise FieldError(field, f"{value:g} must be {low} and at most {self.high:g}")


def _float32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


RANGES: Final = {
    "temperature": Range(1, 0, 100),
    "top_p": Range(1, 0, 1, low_included=False),
    "min_p": Range(0, 0, 1),
    "presence_penalty": Range(0, -2, 2),
    "frequency_penalty": Range(0, -2, 2),
    "repetition_penalty": Range(1, 0.01, 10),
}
_LOGIT_BIAS: Final = Range(0, -100, 100)


def complete(given: SamplingParams, vocab_size: int, field: str) -> SamplingParams:
    """A copy with every default filled in, and a seed drawn. `field` is the path of `given`.

    Raises:
        FieldError: a parameter is out of its range.
    """
    filled: Any = SamplingParams()
    filled.CopyFrom(given)
    for name, bounds in RANGES.items():
        if filled.HasField(name):
            bounds.check(getattr(filled, name), f"{field}.{name}")
        else:
            setattr(filled, name, bounds.default)
    if filled.logprobs > MAX_LOGPROBS:
        raise FieldError(f"{field}.logprobs", f"{filled.logprobs} must be at most {MAX_LOGPROBS}")
    _check_logit_bias(filled.logit_bias, vocab_size, f"{field}.logit_bias")
    if not filled.HasField("top_k"):
        filled.top_k = 0
    if not filled.HasField("seed"):
        filled.seed = secrets.randbits(64)
    return filled  # type: ignore[no-any-return]


def _check_logit_bias(biases: Mapping[int, float], vocab_size: int, field: str) -> None:
    if len(biases) > MAX_LOGIT_BIASES:
        raise FieldError(field, f"{len(biases)} tokens, at most {MAX_LOGIT_BIASES} are taken")
    for token_id, value in biases.items():
        if token_id >= vocab_size:
            raise FieldError(field, f"{token_id} must be less than the vocabulary's {vocab_size}")
        _LOGIT_BIAS.check(value, f"{field}[{token_id}]")


def check_lengths(max_tokens: int, min_tokens: int, field: str) -> None:
    """Raises `FieldError` on numbers of tokens that no output can have. `field` is the path of both."""
    if max_tokens < 1:
        raise FieldError(f"{field}.max_tokens", "0 must be at least 1; leave it unset for as many as fit")
    if min_tokens > max_tokens:
        message = f"{min_tokens} must be at most max_tokens, which is {max_tokens}"
        raise FieldError(f"{field}.min_tokens", message)


def check_prompt_logprobs(top: int, prompt_length: int, field: str) -> None:
    """Raises `FieldError` on more likeliest tokens at each position, or in all, than are given out."""
    if top > MAX_LOGPROBS:
        raise FieldError(field, f"{top} must be at most {MAX_LOGPROBS}")
    if prompt_length * (1 + top) > MAX_PROMPT_LOGPROBS:
        longest = MAX_PROMPT_LOGPROBS // (1 + top)
        message = (
            f"{prompt_length} prompt tokens times {1 + top} log-probabilities must be at most "
            f"{MAX_PROMPT_LOGPROBS}; shorten the prompt to {longest} or ask for fewer"
        )
        raise FieldError(field, message)


def check_stop_strings(strings: Sequence[str], field: str) -> None:
    """Raises `FieldError` on too many, or on one that is empty or too long."""
    if len(strings) > MAX_STOP_STRINGS:
        raise FieldError(field, f"{len(strings)} stop strings, at most {MAX_STOP_STRINGS} are taken")
    for index, string in enumerate(strings):
        size = len(string.encode())
        if not 1 <= size <= MAX_STOP_STRING_BYTES:
            message = f"{size} bytes long, must be at least 1 and at most {MAX_STOP_STRING_BYTES}"
            raise FieldError(f"{field}[{index}]", message)


def check_stop_tokens(count: int, field: str) -> None:
    """Raises `FieldError` on more than a request may have of its own."""
    if count > MAX_STOP_TOKENS:
        raise FieldError(field, f"{count} stop tokens, at most {MAX_STOP_TOKENS} are taken")
