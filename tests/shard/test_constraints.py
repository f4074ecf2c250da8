"""Compiled constraints and matchers, by hand; tests/engine/test_constraints.py has them at work."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import xgrammar

from pagoda.shard.v1.shard_pb2 import Join
from pagoda.v1.inference_pb2 import Choices, Constraint
from shard import constraints, grammar_compiler
from shard.constraints import ConstraintError, Grammars, Matcher, mask_logits
from tests.router.models import byte_level_bpe, sentencepiece_bpe

VOCAB_SIZE = 500
STOP = 2


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    byte_level_bpe().save(str(path))
    return path


@pytest.fixture(scope="module")
def grammars(tokenizer_file: Path) -> Grammars:
    return Grammars(tokenizer_file, VOCAB_SIZE)


def choice(*values: str) -> Constraint:
    return Constraint(choice=Choices(values=values))


def matcher(
    grammars: Grammars, constraint: Constraint, output: Sequence[int] = (), stop: int = STOP
) -> Matcher:
    join = Join(
        token_ids=[7, 8, *output], prompt_length=2, constraint=constraint, stop_token_ids=[stop, 10**6]
    )
    return grammars.match(join)


def allowed(one: Matcher) -> set[int]:
    logits = torch.zeros(3, VOCAB_SIZE)
    mask_logits(logits, [None, one, None])
    assert not logits[0].any()
    assert not logits[2].any()
    return set(logits[1].isfinite().nonzero().flatten().tolist())


def ids(text: str) -> list[int]:
    token_ids: list[int] = byte_level_bpe().encode(text).ids
    return token_ids


def test_a_mask_allows_what_the_grammar_does_and_nothing_special(grammars: Grammars) -> None:
    first = allowed(matcher(grammars, choice("<s>no", "yes")))

    assert {byte_level_bpe().id_to_token(token) for token in first} >= {"<", "y"}
    assert first.isdisjoint(ids("<s>")[:1] if len(ids("<s>")) == 1 else {2})
    assert STOP not in first


def test_after_its_end_only_stop_tokens_follow(grammars: Grammars) -> None:
    assert allowed(matcher(grammars, choice("yes"), ids("yes"))) == {STOP}


def test_once_it_has_ended_anything_goes(grammars: Grammars) -> None:
    assert len(allowed(matcher(grammars, choice("yes"), [*ids("yes"), STOP, 9, 9]))) == VOCAB_SIZE


def test_after_tokens_that_it_does_not_allow_nothing_goes(grammars: Grammars) -> None:
    assert not allowed(matcher(grammars, choice("yes"), ids("no")))


@pytest.mark.parametrize(("output", "expected"), [("", True), ("ye", True), ("yes", True), ("no", False)])
def test_it_tells_whether_an_output_may_begin_so(grammars: Grammars, output: str, expected: bool) -> None:
    assert grammars.allows(choice("yes"), ids(output)) is expected


def test_a_fork_goes_on_by_itself(grammars: Grammars) -> None:
    source = matcher(grammars, Constraint(regex="(ab|cd)x"), ids("a"))
    twin = source.fork()

    before = allowed(twin)
    allowed(source)

    assert allowed(matcher(grammars, Constraint(regex="(ab|cd)x"), ids("a"))) == before


def test_a_dead_end_allows_nothing(grammars: Grammars) -> None:
    """Such as one behind more text than a trial walks."""
    constraint = Constraint(ebnf='root ::= "a"{80} dead\ndead ::= dead "x"')
    one = matcher(grammars, constraint, [token for _ in range(80) for token in ids("a")])

    assert not allowed(one)


def test_a_token_that_takes_too_long_allows_nothing(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constraints, "_STEP_SECONDS", -1.0)

    assert not allowed(matcher(grammars, choice("yes")))


def test_each_constraint_is_compiled_once(grammars: Grammars) -> None:
    assert grammars.get(choice("once")) is grammars.get(choice("once"))


def test_the_cache_is_bounded(tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constraints, "CACHE_BYTES", 1)
    small = Grammars(tokenizer_file, VOCAB_SIZE)
    first = small.get(choice("first"))
    small.get(choice("second"))

    assert small.get(choice("first")) is not first


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        (Constraint(), "no kind"),
        (Constraint(ebnf="root ::= nobody"), '^EBNF parser error at line 1, column 10: Rule "nobody"'),
        (Constraint(json_schema=json.dumps({"minimum": -(10**400), "maximum": 10**400})), "^minimum -10"),
        (Constraint(ebnf="root ::= root"), "no text can satisfy"),
        (Constraint(json_schema='{"const": [1e999]}'), "beyond 9223372036854775807"),
        (Constraint(json_schema='{"type": "integer", "minimum": 5, "maximum": 1}'), "leave no integer"),
        (Constraint(json_schema="[" * 60_000), "nested too deep"),
        (Constraint(regex="((((a?){100}){100}){100}){100}"), "too ambiguous"),
        (Constraint(ebnf=f"root ::= {'(' * 30_000}'a'{')' * 30_000}"), "."),
    ],
)
def test_what_can_not_be_compiled_is_refused_with_the_reason(
    grammars: Grammars, constraint: Constraint, message: str
) -> None:
    with pytest.raises(ConstraintError, match=message):
        grammars.get(constraint)


@pytest.mark.parametrize("grammar", ['root ::= ""', 'root ::= "{\\"a\\": " "1"? "}"'])
def test_what_should_be_json_and_is_not_is_refused(
    tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch, grammar: str
) -> None:
    """Should xgrammar make such a grammar of a schema that it was thought to honour."""
    compiler = xgrammar.GrammarCompiler(grammar_compiler.tokenizer_info(tokenizer_file, VOCAB_SIZE))
    monkeypatch.setattr(grammar_compiler, "build", lambda _: xgrammar.Grammar.from_ebnf(grammar))

    with pytest.raises(ConstraintError, match="allows what is no JSON"):
        grammar_compiler._compile(compiler, Constraint(json_schema="{}"), VOCAB_SIZE)


def test_a_compile_without_end_is_refused_and_the_next_one_succeeds(
    tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_compiler, "CPU_SECONDS", 0)
    grammars = Grammars(tokenizer_file, VOCAB_SIZE)
    wide = json.dumps({"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(3000)}})

    with pytest.raises(ConstraintError, match="takes more than 10 s or 1024 MiB"):
        grammars.get(Constraint(json_schema=wide))

    assert grammars.get(choice("after"))


def test_a_fault_of_the_machine_is_not_remembered(
    tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("no more processes")

    grammars = Grammars(tokenizer_file, VOCAB_SIZE)
    with monkeypatch.context() as patched:
        patched.setattr(grammar_compiler, "_start", fail)
        with pytest.raises(OSError, match="no more processes"):
            grammars.get(choice("yes"))

    assert grammars.get(choice("yes"))


def test_byte_fallback_vocabularies_spell_any_text(tmp_path: Path) -> None:
    tokenizer = sentencepiece_bpe()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    grammars = Grammars(tmp_path / "tokenizer.json", VOCAB_SIZE)

    first = allowed(matcher(grammars, choice("é", " x")))

    assert {tokenizer.id_to_token(token) for token in first} >= {"<0xC3>", "▁"}
