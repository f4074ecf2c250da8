"""A body to the `GenerateSpec` that it stands for. Values pass as they are; `validate` judges them."""

import json
from collections.abc import Mapping
from typing import Any, Final

from pagoda.v1 import inference_pb2 as pb
from router.errors import invalid, unserved
from router.openai.schemas import GenerateBody

# Fields of OpenAI and vLLM that would change the answer, and what they may hold all the same.
_UNSERVED: Final[dict[str, tuple[Any, ...]]] = {
    "add_special_tokens": (None, True),
    "allowed_token_ids": (None, []),
    "audio": (None,),
    "bad_words": (None, []),
    "chat_template": (None,),
    "documents": (None, []),
    "function_call": (None,),
    "functions": (None, []),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "modalities": (None, ["text"]),
    "prompt_embeds": (None,),
    "prompt_logprobs": (None,),
    "reasoning_effort": (None,),
    "return_token_ids": (None, False),
    "return_tokens_as_token_ids": (None, False),
    "skip_special_tokens": (None, True),
    "suffix": (None, ""),
    "truncate_prompt_tokens": (None,),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
}
# From the kinds of a Constraint to their names in `structured_outputs`, where they differ.
_STRUCTURED_OUTPUTS: Final = {"json_schema": "json", "ebnf": "grammar", "choice.values": "choice"}
_SAMPLING: Final = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)


def check_served(given: Mapping[str, Any] | None) -> None:
    """Refuses fields that would change the answer and aren't served; ignores all others.

    Raises:
        RequestError: UNIMPLEMENTED, naming the field.
    """
    for name, value in (given or {}).items():
        if name in _UNSERVED and value not in _UNSERVED[name]:
            raise unserved(name)


def common_spec(body: GenerateBody, request_id: str) -> pb.GenerateSpec:
    """All but prompt, log-probabilities and the longest output.

    Raises:
        RequestError: a field isn't served, or can't stand in a spec.
    """
    check_served(body.model_extra)
    spec = pb.GenerateSpec(
        model=body.model or "",
        request_id=request_id,
        n=body.n,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
    )
    for name in _SAMPLING:
        if (value := getattr(body, name)) is not None:
            setattr(spec.sampling, name, value)
    if body.top_k is not None:
        spec.sampling.top_k = max(body.top_k, 0)
    if body.seed is not None:
        spec.sampling.seed = body.seed % 2**64
    for key, bias in (body.logit_bias or {}).items():
        if not (key.isascii() and key.isdecimal() and int(key) < 2**32):
            raise invalid("logit_bias", f"{key[:40]!r} must be a token id")
        spec.sampling.logit_bias[int(key)] = bias
    _set_stop(spec.stop, body)
    if body.use_beam_search:
        spec.beam_search.beam_width = body.n or 1
        spec.beam_search.early_stopping = bool(body.early_stopping)
        if body.length_penalty is not None:
            spec.beam_search.length_penalty = body.length_penalty
    _set_constraint(spec, body)
    return spec


def field_of(body: GenerateBody, field: str) -> str:
    """`spec.constraint` and its parts by the names that the body gives them; other fields as they are."""
    if not field.startswith("spec.constraint"):
        return field
    part = field.removeprefix("spec.constraint")
    if body.structured_outputs is not None:
        for ours, theirs in _STRUCTURED_OUTPUTS.items():
            part = part.replace(ours, theirs)
        return f"structured_outputs{part}"
    if body.response_format is not None and body.response_format.type != "text":
        return f"response_format{part}"
    return "tools"


def _set_stop(stop: pb.StopConditions, body: GenerateBody) -> None:
    stop.strings.extend([body.stop] if isinstance(body.stop, str) else body.stop or [])
    stop.token_ids.extend(body.stop_token_ids or [])
    stop.ignore_eos = bool(body.ignore_eos)
    stop.include_stop_string = bool(body.include_stop_str_in_output)
    stop.min_tokens = body.min_tokens or 0


def _set_constraint(spec: pb.GenerateSpec, body: GenerateBody) -> None:
    kinds: dict[str, Any] = {}
    match body.response_format:
        case None:
            pass
        case format if format.type == "json_object":
            kinds["response_format"] = pb.Constraint(json_object=True)
        case format if format.type == "json_schema":
            if format.json_schema is None:
                raise invalid("response_format.json_schema", "is missing")
            schema = json.dumps(format.json_schema.schema_)
            kinds["response_format"] = pb.Constraint(json_schema=schema)
    if (given := body.structured_outputs) is not None:
        schema_given = given.json_schema
        fields: dict[str, Any] = {
            "json_schema": schema_given if isinstance(schema_given, str | None) else json.dumps(schema_given),
            "json_object": given.json_object or None,
            "regex": given.regex,
            "choice": None if given.choice is None else pb.Choices(values=given.choice),
            "ebnf": given.grammar,
        }
        chosen = {name: value for name, value in fields.items() if value is not None}
        if len(chosen) != 1:
            message = "give exactly one of json, json_object, regex, choice, grammar"
            raise invalid("structured_outputs", message)
        kinds["structured_outputs"] = pb.Constraint(**chosen)
    if len(kinds) > 1:
        raise invalid("structured_outputs", "doesn't go with response_format; give one of them")
    for constraint in kinds.values():
        spec.constraint.CopyFrom(constraint)
