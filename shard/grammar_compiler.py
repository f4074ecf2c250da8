"""Compiles constraints, each in a process that may die of it.

xgrammar can't be interrupted, and a short schema may keep it busy for hours, fill the memory or overflow the
stack. So it runs in a child with a limit on CPU time and memory for each compile; what exceeds them ends the
child alone. Children are forked from a server process that has imported xgrammar already.

Importing this module takes most of a second, as xgrammar imports transformers.
"""

import functools
import json
import multiprocessing
import os
import random
import re
import resource
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import numpy as np
import tokenizers
import xgrammar

from common.detokenizer import TokenDecoder, UnsupportedDecoderError
from pagoda.v1.inference_pb2 import Constraint
from shard.constraints import ConstraintError
from shard.json_schema import supported
from shard.regex import to_ebnf

CPU_SECONDS: Final = 10
"""For one compile."""
MEMORY_BYTES: Final = 1 << 30
"""For one compile, on top of what the process takes anyway."""
# Steps at random through a new grammar, and the CPU time that one may take on average.
_TRIAL_STEPS: Final = 64
_STEP_SECONDS: Final = 0.005

_context: Final = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload([__name__])


# Where xgrammar 0.2 counts the characters of a string, it forgets that JSON has no raw control characters.
_CONTROL_CHARACTERS: Final = (r"[^\"\\\r\n]", r"[ -!#-[\]-\ud7ff\ue000-\U0010ffff]")
_PATTERN: Final = re.compile(r'(?<=::= )Regex\("([0-9a-f]+)", json_string=true\)$', re.MULTILINE)
_TOO_MUCH: Final = (
    f"it takes more than {CPU_SECONDS} s or {MEMORY_BYTES >> 20} MiB to compile; make it simpler"
)


def tokenizer_info(tokenizer_file: Path, vocab_size: int) -> Any:
    """The vocabulary as xgrammar's TokenizerInfo, filled up to the width of the logits.

    Special tokens stand for no text, so a grammar allows none of them but as a stop token. One more token,
    `vocab_size` itself, stands for the end where there is no other stop token.

    Raises:
        ConstraintError: the tokenizer decodes in a way that isn't known.
    """
    try:
        decoder = TokenDecoder(tokenizers.Tokenizer.from_file(str(tokenizer_file)))
    except UnsupportedDecoderError as error:
        raise ConstraintError(f"this model's tokenizer {error}") from error
    except Exception as error:  # tokenizers raises bare Exception
        raise ConstraintError(f"this model's tokenizer can't be read: {error}") from error
    vocabulary = [decoder.bytes_of(token_id) for token_id in range(vocab_size)]
    return xgrammar.TokenizerInfo([*vocabulary, b""], stop_token_ids=[vocab_size])


def build(constraint: Constraint) -> Any:
    """The xgrammar Grammar of a constraint.

    Raises:
        ValueError, RuntimeError: it can't be honoured.
    """
    match constraint.WhichOneof("kind"):
        case "json_schema":
            return _json_grammar(json.loads(constraint.json_schema))
        case "json_object":
            return _json_grammar({"type": "object"})
        case "regex":
            return xgrammar.Grammar.from_ebnf(f"root ::= {to_ebnf(constraint.regex)}")
        case "ebnf":
            return xgrammar.Grammar.from_ebnf(constraint.ebnf)
        case "choice":
            return xgrammar.Grammar.from_ebnf(
                f"root ::= {' | '.join(map(_literal, constraint.choice.values))}"
            )
        case _:
            raise ValueError("no kind is set")


def _json_grammar(schema: Any) -> Any:
    # On one line: left to choose, small models fill the output with whitespace.
    grammar = xgrammar.Grammar.from_json_schema(
        json.dumps(supported(schema), allow_nan=False), any_whitespace=False, strict_mode=False
    )
    text = str(grammar).replace(*_CONTROL_CHARACTERS)
    return xgrammar.Grammar.from_ebnf(_PATTERN.sub(lambda match: bytes.fromhex(match[1]).decode(), text))


def _literal(text: str) -> str:
    return '"' + "".join(rf"\U{ord(character):08x}" for character in text) + '"'


def _compile(compiler: Any, constraint: Constraint, vocab_size: int) -> str:
    try:
        compiled = compiler.compile_grammar(build(constraint))
        _try(compiled, vocab_size, is_json=constraint.WhichOneof("kind") in ("json_schema", "json_object"))
        return str(compiled.serialize_json())
    except ValueError as error:
        raise ConstraintError(str(error)) from error
    except RecursionError:
        raise ConstraintError("it is nested too deep") from None
    except MemoryError:
        raise ConstraintError(_TOO_MUCH) from None
    except RuntimeError as error:
        message = str(error)
        raise ConstraintError(_TOO_MUCH if "bad_alloc" in message else _readable(message)) from error


def _try(compiled: Any, vocab_size: int, is_json: bool) -> None:
    """Walks at random through what the grammar allows, from its beginning anew after each end.

    Raises:
        ConstraintError: that leads to where nothing is allowed, takes too long, or should be JSON and is not.
    """
    matcher = xgrammar.GrammarMatcher(compiled)
    vocabulary = compiled.tokenizer_info.decoded_vocab
    mask = xgrammar.allocate_token_bitmask(1, vocab_size + 1)
    choose = random.Random(0)  # noqa: S311
    started = time.process_time()
    text = b""
    for step in range(_TRIAL_STEPS):
        matcher.fill_next_token_bitmask(mask)
        allowed = np.flatnonzero(np.unpackbits(mask.numpy().view(np.uint8), bitorder="little"))
        if not len(allowed):
            raise ConstraintError("there are rules of it that no text can satisfy")
        if time.process_time() - started > _STEP_SECONDS * max(step, 40):
            raise ConstraintError("it is too ambiguous, or repeats too much: a token takes too long to check")
        going_on = allowed[allowed < vocab_size]
        if is_json and allowed[-1] == vocab_size and not _is_json(text):
            raise ConstraintError("its grammar allows what is no JSON; make it simpler")
        if not len(going_on):
            matcher.reset()
            text = b""
            continue
        token_id = int(choose.choice(going_on))
        matcher.accept_token(token_id)
        text += vocabulary[token_id]


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _readable(message: str) -> str:
    """The first line without xgrammar's time, file and line, and the condition that it checked."""
    line = message.strip().split("\n")[0]
    told = re.sub(r"^\[[^]]*\] \S+:\d+: |Check failed: \(.*?\) is false: ", "", line)
    return told[:500] or "it can't be compiled; make it simpler"


def _serve(connection: Connection, tokenizer_file: Path, vocab_size: int, cpu_seconds: int) -> None:
    """The child: compiles what comes until the other end is gone."""
    # A terminal sends it to the shard and its children alike; the shard says when it ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(10)
    info = tokenizer_info(tokenizer_file, vocab_size)
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    while True:
        try:
            constraint = Constraint.FromString(connection.recv_bytes())
        except EOFError:
            return
        _limit(cpu_seconds)
        try:
            connection.send((True, _compile(compiler, constraint, vocab_size)))
        except ConstraintError as error:
            connection.send((False, str(error)))


def _limit(cpu_seconds: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limits = {
        resource.RLIMIT_CPU: int(time.process_time()) + 1 + cpu_seconds,
        resource.RLIMIT_AS: pages * resource.getpagesize() + MEMORY_BYTES,
    }
    for kind, limit in limits.items():
        resource.setrlimit(kind, (limit, resource.getrlimit(kind)[1]))


class CompilerProcess:
    """A child that compiles one constraint at a time. Not thread-safe."""

    def __init__(self, tokenizer_file: Path, vocab_size: int) -> None:
        self._start = functools.partial(_start, tokenizer_file, vocab_size)
        self._process, self._connection = self._start()

    def compile(self, constraint: Constraint) -> str:
        """The compiled grammar, as xgrammar serialises it.

        Raises:
            ConstraintError: it can't be honoured, or took more than the limits.
        """
        if not self._process.is_alive():
            self._process, self._connection = self._start()
        try:
            self._connection.send_bytes(constraint.SerializeToString())
            done, text = self._connection.recv()
        except (EOFError, OSError):
            self._process.join()
            code = self._process.exitcode
            crash = "it can't be compiled; make it simpler"
            raise ConstraintError(_TOO_MUCH if code == -signal.SIGXCPU else crash) from None
        if not done:
            raise ConstraintError(text)
        return str(text)


def _start(tokenizer_file: Path, vocab_size: int) -> tuple[Any, Connection]:
    ours, theirs = _context.Pipe()
    arguments = (theirs, tokenizer_file, vocab_size, CPU_SECONDS)
    process = _context.Process(target=_serve, args=arguments, daemon=True)
    process.start()
    theirs.close()
    return process, ours
