"""What a router checks of a constraint. Whether a grammar can honour it, the shard says at submit."""

import json
from collections.abc import Set
from typing import Final

from pagoda.v1.inference_pb2 import Choices, GenerateSpec
from router.errors import invalid

MAX_CONSTRAINT_BYTES: Final = 65_536
MAX_CHOICES: Final = 256


def check_constraint(spec: GenerateSpec, stop_token_ids: Set[int]) -> None:
    """Checks `spec.constraint`, if it is set, and what can't stand beside it.

    Raises:
        RequestError: INVALID_ARGUMENT.
    """
    if not spec.HasField("constraint"):
        return
    kind = spec.constraint.WhichOneof("kind")
    if kind is None:
        kinds = ", ".join(field.name for field in spec.constraint.DESCRIPTOR.fields)
        raise invalid("spec.constraint", f"is empty; set one of {kinds}")
    field = f"spec.constraint.{kind}"
    size = spec.constraint.ByteSize()
    if size > MAX_CONSTRAINT_BYTES:
        raise invalid(field, f"{size} bytes long, at most {MAX_CONSTRAINT_BYTES} are taken")
    match kind:
        case "json_schema":
            _check_schema(spec.constraint.json_schema, field)
        case "choice":
            _check_choices(spec.constraint.choice, field)
        case "json_object":
            if not spec.constraint.json_object:
                raise invalid(field, "false has no meaning; leave the constraint unset")
        case _:
            if not getattr(spec.constraint, kind):
                raise invalid(field, "is empty")
    if spec.HasField("beam_search"):
        raise invalid("spec.constraint", "doesn't go with a beam search")
    if spec.stop.min_tokens:
        message = "doesn't go with a constraint, which says itself when an output may end"
        raise invalid("spec.stop.min_tokens", message)
    if not stop_token_ids:
        message = "is required with a constraint and ignore_eos: something must end the output"
        raise invalid("spec.stop.token_ids", message)


def _check_schema(text: str, field: str) -> None:
    try:
        schema = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise invalid(field, "is nested too deep") from None
    except ValueError as error:
        raise invalid(field, f"is not JSON: {error}") from None
    if not isinstance(schema, dict | bool):
        raise invalid(field, "must be a JSON object or a boolean")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")


def _check_choices(choices: Choices, field: str) -> None:
    if not 1 <= len(choices.values) <= MAX_CHOICES:
        raise invalid(f"{field}.values", f"{len(choices.values)} values, 1 to {MAX_CHOICES} are taken")
    for index, value in enumerate(choices.values):
        if not value:
            raise invalid(f"{field}.values[{index}]", "is empty")
