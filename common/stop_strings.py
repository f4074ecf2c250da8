"""Where an output's text meets a stop string, however the text is cut into pieces."""

from collections.abc import Sequence


class _Automaton:
    """How much of one stop string the text ends with (Knuth, Morris, Pratt)."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        # The longest proper prefix of stop[: i + 1] that also ends it.
        self._fallback = [0] * len(stop)
        for end in range(1, len(stop)):
            self._fallback[end] = self._advance(self._fallback[end - 1], stop[end])
        self.matched = 0

    def _advance(self, matched: int, character: str) -> int:
        while matched and self.stop[matched] != character:
            matched = self._fallback[matched - 1]
        return matched + (self.stop[matched] == character)

    def push(self, character: str) -> bool:
        """Whether the stop string is complete with this character."""
        self.matched = self._advance(self.matched, character)
        if self.matched < len(self.stop):
            return False
        self.matched = self._fallback[-1]
        return True


class StopMatcher:
    """Holds back what may turn out to be a stop string; costs O(stop strings) per character.

    The match that *ends* first wins, and of those that end together the longest, so that the result
    doesn't depend on how the text arrives.

    Attributes:
        matched: The stop string that ended the text, once one did.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """Matches `stops`, none of them empty; `include` keeps the matched one in the text."""
        self._automata = [_Automaton(stop) for stop in sorted(stops, key=len, reverse=True)]
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, *, count: bool = True) -> str:
        """The text that is certain now; nothing more once a stop string matched.

        Without `count`, a match that ends in this text is none.
        """
        if self.matched is not None:
            return ""
        if not self._automata:
            return text
        for position, character in enumerate(text):
            complete = [automaton.stop for automaton in self._automata if automaton.push(character)]
            if complete and count:
                self.matched = complete[0]
                seen = self._held + text[: position + 1]
                self._held = ""
                return seen if self._include else seen[: -len(self.matched)]
        seen = self._held + text
        border = len(seen) - max(automaton.matched for automaton in self._automata)
        self._held = seen[border:]
        return seen[:border]

    def flush(self) -> str:
        """What was held back, at the end of an output that no stop string ended."""
        held, self._held = self._held, ""
        return held
