"""Clients' strings as mere text, also where they spell a special token.

A chat is tokenised after its template rendered it, and the template's special tokens are found by their text.
A user who writes one could end a turn and forge another. So each that a client wrote is cut in two, and the
halves are tokenised apart.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Final, TypeVar

# A noncharacter: Unicode leaves it to such uses, so no text loses anything with it.
_CUT: Final = "\ufdd0"

T = TypeVar("T")


class LiteralText:
    """Cuts the special tokens of one tokenizer."""

    def __init__(self, special_tokens: Iterable[str]) -> None:
        self._starts = re.compile(f"(?={_any_of(special_tokens)})(.)", re.DOTALL)

    def cut(self, value: T) -> T:
        """`value`, which JSON can hold, with a cut in each special token in its strings."""
        text = json.dumps(value, ensure_ascii=False)
        cut, count = self._starts.subn(rf"\1{_CUT}", text)
        return json.loads(cut) if count else value


def pieces(rendered: str) -> list[str]:
    """What to tokenise apart: the text between the cuts."""
    return rendered.split(_CUT)


def _any_of(words: Iterable[str]) -> str:
    """A pattern that matches where one of `words` begins; shared beginnings are tried once."""
    tails = defaultdict(list)
    for word in words:
        tails[word[:1]].append(word[1:])
    if "" in tails:
        return ""
    return f"(?:{'|'.join(re.escape(first) + _any_of(tails[first]) for first in sorted(tails)) or '(?!)'})"
