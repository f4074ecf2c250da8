"""What is checked of a constraint at the edge. Whether a grammar can honour it, the shard says at submit."""

import json
from collections.abc import Collection
from typing import Final

from common import strict_json
from common.sampling import FieldError
from pagoda.v1.inference_pb2 import Choices, Constraint

MAX_CONSTRAINT_BYTES: Final = 65_536
MAX_CHOICES: Final = 256


def check_constraint(
    constraint: Constraint, stop_token_ids: Collection[int], min_tokens: int, field: str
) -> None:
    """Checks a constraint, and what can't stand beside it.

    Raises:
        FieldError: on `field` or a part of it.
    """
    kind = constraint.WhichOneof("kind")
    if kind is None:
        kinds = ", ".join(one.name for one in constraint.DESCRIPTOR.fields)
        raise FieldError(field, f"is empty; set one of {kinds}")
    if min_tokens:
        raise FieldError(field, "doesn't go with min_tokens: it says itself when an output may end")
    if not stop_token_ids:
        raise FieldError(field, "needs something to end the output: with ignore_eos, give stop token ids")
    field = f"{field}.{kind}"
    size = constraint.ByteSize()
    if size > MAX_CONSTRAINT_BYTES:
        raise FieldError(field, f"{size} bytes long, at most {MAX_CONSTRAINT_BYTES} are taken")
    match kind:
        case "json_schema":
            _check_schema(constraint.json_schema, field)
        case "choice":
            _check_choices(constraint.choice, field)
        case "json_object":
            if not constraint.json_object:
                raise FieldError(field, "false has no meaning; leave the constraint unset")
        case _:
            if not getattr(constraint, kind):
                raise FieldError(field, "is empty")


def _check_schema(text: str, field: str) -> None:
    try:
        schema = strict_json.loads(text)
        json.dumps(schema, ensure_ascii=False).encode()
    except RecursionError:
        raise FieldError(field, "is nested too deep") from None
    except UnicodeEncodeError:
        raise FieldError(field, "has half of a surrogate pair, which no text holds") from None
    except ValueError as error:
        raise FieldError(field, f"is not JSON: {error}") from None
    if not isinstance(schema, dict | bool):
        raise FieldError(field, "must be a JSON object or a boolean")


def _check_choices(choices: Choices, field: str) -> None:
    if not 1 <= len(choices.values) <= MAX_CHOICES:
        raise FieldError(f"{field}.values", f"{len(choices.values)} values, 1 to {MAX_CHOICES} are taken")
    for index, value in enumerate(choices.values):
        if not value:
            raise FieldError(f"{field}.values[{index}]", "is empty")
