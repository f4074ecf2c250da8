"""What constraints allow next: compiled grammars, and one matcher for each constrained slot."""

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import Tensor

from pagoda.shard.v1.shard_pb2 import Join
from pagoda.v1.inference_pb2 import Constraint
from shard.sampler import SampleResult

if TYPE_CHECKING:
    from shard.grammar_compiler import CompilerProcess

COMPILERS: Final = 2
CACHE_BYTES: Final = 256 << 20
_REFUSAL_BYTES: Final = 1024
# Of CPU time. A matcher that takes longer for one token holds up its neighbours: it is given up.
_STEP_SECONDS: Final = 0.25


class ConstraintError(ValueError):
    """A constraint that can't be served; the message is for the client."""


@dataclass(frozen=True)
class Grammar:
    """A compiled constraint, and its size in bytes."""

    compiled: Any
    size: int


class Grammars:
    """Compiles constraints, and keeps those used last. Thread-safe."""

    def __init__(self, tokenizer_file: Path, vocab_size: int) -> None:
        """`vocab_size` is the width of the logits."""
        self._tokenizer_file = tokenizer_file
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        # By the constraint's digest, least recently used first. Refusals are remembered, too.
        self._grammars: OrderedDict[bytes, Future[Grammar]] = OrderedDict()
        self._size = 0
        self._idle = threading.Semaphore(COMPILERS)
        self._compilers: list[CompilerProcess] = []
        self._info: Any = None

    def get(self, constraint: Constraint) -> Any:
        """Its compiled grammar. Whoever asks first compiles it, in this thread; others wait for that.

        Raises:
            ConstraintError: it can't be honoured.
        """
        key = hashlib.sha256(constraint.SerializeToString(deterministic=True)).digest()
        with self._lock:
            known = self._grammars.get(key)
            if known:
                self._grammars.move_to_end(key)
            else:
                mine = self._grammars[key] = Future()
        if known:
            return known.result().compiled
        try:
            grammar = self._compile(constraint)
            mine.set_result(grammar)
            self._add(grammar.size)
        except ConstraintError as error:
            mine.set_exception(error)
            self._add(_REFUSAL_BYTES)
        except BaseException as error:
            # A fault of this machine, at this moment.
            with self._lock:
                del self._grammars[key]
            mine.set_exception(error)
        return mine.result().compiled

    def allows(self, constraint: Constraint, token_ids: Sequence[int]) -> bool:
        """Whether an output may begin so.

        Raises:
            ConstraintError: as `get`.
        """
        import xgrammar

        matcher = xgrammar.GrammarMatcher(self.get(constraint))
        return all(matcher.accept_token(token_id) for token_id in token_ids)

    def match(self, join: Join) -> "Matcher":
        """A matcher for a sequence that joins, at the end of the output that it has.

        The constraint was prepared; if its grammar was dropped since, it is compiled here and now.
        """
        stop_token_ids = [token_id for token_id in join.stop_token_ids if token_id < self._vocab_size]
        return Matcher(self.get(join.constraint), stop_token_ids, join.token_ids[join.prompt_length :])

    def _compile(self, constraint: Constraint) -> Grammar:
        # Imports transformers.
        import xgrammar

        from shard.grammar_compiler import CompilerProcess, tokenizer_info

        with self._lock:
            self._info = self._info or tokenizer_info(self._tokenizer_file, self._vocab_size)
        with self._idle:
            with self._lock:
                compiler = self._compilers.pop() if self._compilers else None
            compiler = compiler or CompilerProcess(self._tokenizer_file, self._vocab_size)
            try:
                serialised = compiler.compile(constraint)
            finally:
                with self._lock:
                    self._compilers.append(compiler)
        compiled = xgrammar.CompiledGrammar.deserialize_json(serialised, self._info)
        return Grammar(compiled, compiled.memory_size_bytes)

    def _add(self, size: int) -> None:
        with self._lock:
            self._size += size
            while self._size > CACHE_BYTES and len(self._grammars) > 1:
                oldest = next((key for key, future in self._grammars.items() if future.done()), None)
                if oldest is None:
                    return
                future = self._grammars.pop(oldest)
                self._size -= _REFUSAL_BYTES if future.exception() else future.result().size


class Matcher:
    """How far one sequence's output has come in its grammar.

    A token is taken when the next mask is asked for: it may still be on its way from the device when it is
    sampled.
    """

    def __init__(self, grammar: Any, stop_token_ids: Sequence[int], output_token_ids: Sequence[int]) -> None:
        """`grammar` is xgrammar's; after it, one of `stop_token_ids` may come, and nothing else."""
        import xgrammar

        self._matcher = xgrammar.GrammarMatcher(grammar, override_stop_tokens=list(stop_token_ids) or None)
        self._untaken: list[int] = list(output_token_ids)
        self._sampled: tuple[SampleResult, int] | None = None
        # Took a stop token: what comes is nobody's.
        self._ended = False
        # Took one that the grammar doesn't allow.
        self._broken = False

    def fork(self) -> "Matcher":
        """One at the same place, that goes on by itself."""
        twin = object.__new__(Matcher)
        twin.__dict__.update(self.__dict__, _matcher=self._matcher.fork(), _untaken=[*self._untaken])
        return twin

    def sampled(self, samples: SampleResult, row: int) -> None:
        """The token of this row is the output's next."""
        self._sampled = (samples, row)

    def fill(self, mask: Tensor, row: int) -> None:
        """Sets the bits of the tokens that may come next in a row of `mask`, int32 `[rows, vocab / 32]`.

        None are set where the output broke the grammar, or is at a dead end of it, or a token takes too long;
        all where the output has ended.
        """
        started = time.thread_time()
        if self._sampled:
            samples, place = self._sampled
            self._untaken.append(samples.token_id(place))
            self._sampled = None
        for token_id in self._untaken:
            if not (self._ended or self._broken):
                self._broken = not self._matcher.accept_token(token_id)
                self._ended = self._matcher.is_terminated()
        replayed, self._untaken = len(self._untaken), []
        if self._ended or self._broken:
            mask[row] = -1 if self._ended else 0
            return
        self._matcher.fill_next_token_bitmask(mask, row)
        if time.thread_time() - started > _STEP_SECONDS * max(replayed, 1):
            mask[row] = 0


def mask_logits(logits: Tensor, matchers: Sequence[Matcher | None]) -> None:
    """Puts -inf in the place of what the matcher of a row of `logits` `[rows, vocab]` doesn't allow.

    A row takes under 0.1 ms of the host, which on a GPU pass while the model runs.
    """
    vocab_size = logits.shape[-1]
    # The matchers know one token more, which stands for the end.
    mask = torch.empty(len(matchers), vocab_size // 32 + 1, dtype=torch.int32)
    rows = []
    for row, matcher in enumerate(matchers):
        if matcher:
            matcher.fill(mask, row)
            rows.append(row)
    if logits.device.type == "cpu":
        # A sixth of the time of xgrammar's own.
        for row in rows:
            forbidden = np.unpackbits(~mask[row].numpy().view(np.uint8), count=vocab_size, bitorder="little")
            np.copyto(logits[row].numpy(), -np.inf, where=forbidden.view(np.bool_))
        return

    import xgrammar

    xgrammar.apply_token_bitmask_inplace(
        logits, mask.to(logits.device), vocab_size=vocab_size, indices=rows, backend="torch_native"
    )
