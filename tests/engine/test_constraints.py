"""Structured output of a tiny random model: whatever it would like to say, its outputs are valid."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import jsonschema
import pytest
from tokenizers import Tokenizer

from common.detokenizer import TokenDecoder
from pagoda.scheduler.v1.scheduler_pb2 import Submit
from pagoda.v1.inference_pb2 import Choices, Constraint, PriorOutput
from pagoda.v1.sampling_pb2 import SamplingParams
from tests.engine.inprocess import InProcessShard, engine_on, generate, request
from tests.engine.schemas import schemas
from tests.oracle import random_tokens, tiny_model
from tests.router.models import byte_level_bpe

END = 1
POOL = {"num_gpu_blocks_override": 1024, "max_num_seqs": 32, "max_num_batched_tokens": 256}
CONSTRAINTS = {
    "json_object": Constraint(json_object=True),
    "json_schema": Constraint(
        json_schema=json.dumps({"type": "array", "items": {"type": "string", "maxLength": 8}, "minItems": 3})
    ),
    "regex": Constraint(regex="[a-c]{20,30}(\\d{4}-){3}x"),
    "ebnf": Constraint(ebnf='root ::= item{3,6}\nitem ::= "<" [a-z]{1,4} ">" | "é"'),
    "choice": Constraint(choice=Choices(values=["yes", "no", "日本 or so"])),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The vocabulary is smaller than the logits are wide."""
    folder = tmp_path_factory.mktemp("constraints")
    tiny_model(folder, vocab_size=448, max_position_embeddings=512)
    byte_level_bpe().save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def shard(folder: Path) -> InProcessShard:
    return InProcessShard(folder)


@pytest.fixture(scope="module")
def decoder(folder: Path) -> TokenDecoder:
    return TokenDecoder(Tokenizer.from_file(str(folder / "tokenizer.json")))


def constrained(
    name: str, constraint: Constraint, max_tokens: int = 150, n: int = 1, seed: int = 0
) -> Submit:
    params = SamplingParams(temperature=1, top_p=1, repetition_penalty=1, seed=seed)
    return request(name, random_tokens(20, seed=seed), max_tokens, params, (END,), n, constraint=constraint)


def text(decoder: TokenDecoder, token_ids: Sequence[int]) -> str:
    return b"".join(map(decoder.bytes_of, token_ids)).decode(errors="replace")


def valid(constraint: Constraint, output: str) -> bool:
    match constraint.WhichOneof("kind"):
        case "json_object":
            return isinstance(json.loads(output), dict)
        case "json_schema":
            jsonschema.validate(json.loads(output), json.loads(constraint.json_schema))
            return True
        case "regex":
            return bool(re.fullmatch(constraint.regex, output))
        case "ebnf":
            return bool(re.fullmatch("(<[a-z]{1,4}>|é){3,6}", output))
    return output in constraint.choice.values


@pytest.mark.parametrize("kind", CONSTRAINTS)
async def test_each_kind_of_constraint_is_obeyed(
    shard: InProcessShard, decoder: TokenDecoder, kind: str
) -> None:
    submits = [constrained(f"r{seed}", CONSTRAINTS[kind], seed=seed) for seed in range(16)]

    async with engine_on(shard, **POOL) as engine:
        results = await generate(engine, submits)

    ended = [result.token_ids for result in results.values() if result.token_ids[-1] == END]
    assert len(ended) > 3
    for token_ids in ended:
        assert valid(CONSTRAINTS[kind], text(decoder, token_ids)), text(decoder, token_ids)


async def test_outputs_are_valid_under_hundreds_of_schemas(
    shard: InProcessShard, decoder: TokenDecoder
) -> None:
    all_schemas = dict(schemas())
    submits = [
        constrained(name, Constraint(json_schema=json.dumps(schema)), seed=index)
        for index, (name, schema) in enumerate(all_schemas.items())
    ]

    async with engine_on(shard, **POOL, max_waiting_requests=2048) as engine:
        results = await generate(engine, submits)

    ended = 0
    for name, result in results.items():
        assert not result.refused, (name, result.refused)
        if result.token_ids[-1] == END:
            ended += 1
            validator = jsonschema.Draft202012Validator(
                all_schemas[name], format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
            )
            validator.validate(json.loads(text(decoder, result.token_ids)))
    assert len(all_schemas) > 250
    assert ended > len(all_schemas) * 0.7


@pytest.mark.parametrize("mode", ["recompute", "swap"])
async def test_preemption_changes_no_constrained_output(
    shard: InProcessShard, decoder: TokenDecoder, mode: str
) -> None:
    submits = [constrained(f"r{seed}", CONSTRAINTS["json_schema"], 60, 3, seed) for seed in range(5)]
    async with engine_on(shard, **POOL) as engine:
        free = await generate(engine, submits)
    small = {"num_gpu_blocks_override": 18, "max_num_seqs": 12, "max_num_batched_tokens": 32}

    async with engine_on(shard, **small, preemption_mode=mode, swap_space=0.01) as engine:
        pressed = await generate(engine, submits)
        assert engine.scheduler
        totals = engine.scheduler.totals
        assert totals.recomputes if mode == "recompute" else totals.swapped_in

    for name, result in free.items():
        assert len({tuple(tokens) for tokens in result.outputs.values()}) == 3
        assert pressed[name].outputs == result.outputs
        for token_ids in result.outputs.values():
            assert token_ids[-1] != END or valid(CONSTRAINTS["json_schema"], text(decoder, token_ids))


async def test_a_request_resumes_in_the_middle_of_a_string(shard: InProcessShard) -> None:
    whole_request = constrained("whole", CONSTRAINTS["regex"], seed=3)
    async with engine_on(shard, **POOL) as engine:
        whole = (await generate(engine, [whole_request]))["whole"].token_ids
        assert whole[-1] == END
        resumed_request = Submit()
        resumed_request.CopyFrom(whole_request)
        resumed_request.key.request_id = "resumed"
        resumed_request.prior_outputs.append(PriorOutput(token_ids=whole[:7]))

        resumed = (await generate(engine, [resumed_request]))["resumed"].token_ids

    assert resumed == whole[7:]


async def test_neighbours_of_a_constrained_request_are_as_without_it(shard: InProcessShard) -> None:
    params = SamplingParams(temperature=1, top_p=1, repetition_penalty=1, seed=5, logprobs=3)
    free = [request(f"r{seed}", random_tokens(9, seed=seed), 30, params) for seed in range(4)]

    async with engine_on(shard, **POOL) as engine:
        alone = await generate(engine, free)
        mixed = await generate(engine, [constrained("c", CONSTRAINTS["regex"]), *free])

    for name, result in alone.items():
        assert mixed[name].token_ids == result.token_ids
        expected = [position.chosen.logprob for position in result.logprobs]
        assert [p.chosen.logprob for p in mixed[name].logprobs] == pytest.approx(expected, abs=1e-4)


async def test_logprobs_are_those_of_the_raw_logits(shard: InProcessShard) -> None:
    asking = constrained("c", Constraint(choice=Choices(values=["yes"])))
    asking.sampling.logprobs = 1

    async with engine_on(shard, **POOL) as engine:
        first = (await generate(engine, [asking]))["c"].logprobs[0]

    assert first.chosen.logprob < first.top[0].logprob


async def test_what_can_not_be_honoured_is_refused_and_the_shard_goes_on(shard: InProcessShard) -> None:
    hostile = {
        "unsupported": Constraint(json_schema='{"type": "array", "uniqueItems": true}'),
        "exponential": Constraint(
            ebnf="root ::= r0\n"
            + "".join(f'r{i} ::= r{i + 1} r{i + 1} | ""\n' for i in range(1500))
            + 'r1500 ::= "a" | ""'
        ),
        "unsatisfiable": Constraint(ebnf="root ::= root"),
        "ambiguous": Constraint(regex="((((a?){100}){100}){100}){100}"),
    }
    submits = [constrained(name, constraint) for name, constraint in hostile.items()]

    async with engine_on(shard, **POOL) as engine:
        results = await generate(engine, [*submits, constrained("good", CONSTRAINTS["choice"])])

    refused = {name: result.refused for name, result in results.items() if result.refused}
    assert refused.keys() == hostile.keys()
    assert {refusal.field for refusal in refused.values()} == {"spec.constraint"}
    assert "uniqueItems at #" in refused["unsupported"].message
    assert results["good"].token_ids[-1] == END
