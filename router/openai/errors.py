"""A `RequestError` as OpenAI's clients read it: an HTTP status and `{"error": …}`."""

import json
import math
import reprlib
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final

import grpc
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from router.errors import RequestError, invalid
from router.text import field_name

_Code = grpc.StatusCode

_STATUSES: Final = {
    _Code.INVALID_ARGUMENT: HTTPStatus.BAD_REQUEST,
    _Code.OUT_OF_RANGE: HTTPStatus.BAD_REQUEST,
    _Code.UNIMPLEMENTED: HTTPStatus.BAD_REQUEST,
    _Code.UNAUTHENTICATED: HTTPStatus.UNAUTHORIZED,
    _Code.PERMISSION_DENIED: HTTPStatus.FORBIDDEN,
    _Code.NOT_FOUND: HTTPStatus.NOT_FOUND,
    _Code.FAILED_PRECONDITION: HTTPStatus.CONFLICT,
    _Code.ABORTED: HTTPStatus.CONFLICT,
    _Code.RESOURCE_EXHAUSTED: HTTPStatus.TOO_MANY_REQUESTS,
    _Code.UNAVAILABLE: HTTPStatus.SERVICE_UNAVAILABLE,
    _Code.DEADLINE_EXCEEDED: HTTPStatus.GATEWAY_TIMEOUT,
}
_TYPES: Final = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
}
# Clients look for this one by name.
_CODES: Final = {"PROMPT_TOO_LONG": "context_length_exceeded"}

# From the beginnings of a GenerateSpec's fields to those of a body's; the first that fits counts.
_PARAMS: Final = {
    "spec.text": "prompt",
    "spec.token_ids.ids": "prompt",
    "spec.stop.strings": "stop",
    "spec.stop.token_ids": "stop_token_ids",
    "spec.stop.": "",
    "spec.sampling.": "",
    "spec.beam_search.beam_width": "n",
    "spec.beam_search.": "",
    "spec.chat.template_arguments": "chat_template_kwargs",
    "spec.chat.": "",
    "spec.chat": "messages",
    "spec.prompt_logprobs": "logprobs",
    "spec.": "",
}


class HTTPError(RequestError):
    """One that HTTP has a status of its own for."""

    def __init__(
        self,
        status: HTTPStatus,
        message: str,
        *,
        reason: str,
        code: grpc.StatusCode = _Code.INVALID_ARGUMENT,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(code, message, reason=reason)
        self.status_code = status
        self.headers = headers or {}


def body(error: RequestError) -> dict[str, Any]:
    """What a client is told, beside the status."""
    param = _param(error.field)
    return {
        "error": {
            "message": f"{param}: {error.message}" if param else error.message,
            "type": _type(_status(error)),
            "param": param,
            "code": _CODES.get(error.reason, error.reason.lower()),
        }
    }


def response(error: RequestError) -> Response:
    """The whole answer."""
    headers = dict(error.headers) if isinstance(error, HTTPError) else {}
    if error.code is _Code.UNAUTHENTICATED:
        headers["WWW-Authenticate"] = "Bearer"
    if error.retry_delay is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_delay)))
    return JSONResponse(body(error), _status(error), headers)


def event(error: RequestError) -> bytes:
    """What ends a stream."""
    return b"event: error\ndata: " + json.dumps(body(error)).encode() + b"\n\n"


def from_body(error: RequestValidationError) -> RequestError:
    """A body that isn't JSON, or not of the types of its schema."""
    failures: Sequence[Any] = error.errors()
    first = failures[0]
    if first["type"] == "json_invalid":
        return invalid("", f"the body isn't JSON: {first['ctx']['error']}", "BROKEN_MESSAGE")
    # The first is "body". A field that may be of several types fails once for each.
    path = first["loc"][1:]
    if not path and first["input"] is None:
        return invalid("", "the body is empty; send a JSON object")
    messages = dict.fromkeys(one["msg"] for one in failures if one["loc"][1:2] == path[:1])
    message = "; or: ".join(list(messages)[:4])
    if first["type"] != "missing":
        # Never the whole: a prompt may be megabytes long.
        message += f" (given: {reprlib.repr(first['input'])})"
    if not path:
        return invalid("", f"the body: {message}")
    return invalid(field_name(path) if len(messages) == 1 else field_name(path[:1]), message)


def from_routing(error: HTTPException, method: str, path: str) -> RequestError:
    """No such path or method, or a body that can't be read."""
    status = HTTPStatus(error.status_code)
    match status:
        case HTTPStatus.NOT_FOUND:
            message = f"nothing is served at {path[:200]!r}; /openapi.json lists what is"
            code = _Code.NOT_FOUND
        case HTTPStatus.METHOD_NOT_ALLOWED:
            message = f"{path[:200]!r} doesn't take {method}"
            code = _Code.UNIMPLEMENTED
        case _:
            message = str(error.detail)
            code = _Code.INVALID_ARGUMENT
    return HTTPError(status, message, reason=status.name, code=code, headers=error.headers)


def _status(error: RequestError) -> HTTPStatus:
    if isinstance(error, HTTPError):
        return error.status_code
    return _STATUSES.get(error.code, HTTPStatus.INTERNAL_SERVER_ERROR)


def _type(status: HTTPStatus) -> str:
    return _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")


def _param(field: str) -> str | None:
    for start, name in _PARAMS.items():
        if field.startswith(start):
            return name + field.removeprefix(start)
    return field or None
