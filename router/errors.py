"""What a client is told when its request fails: a gRPC status with google.rpc details."""

import logging
import uuid
from typing import Any, Final

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from common.rpc import failure_code
from pagoda.scheduler.v1.scheduler_pb2 import RequestRefused

DOMAIN: Final = "pagoda"
RETRY_DELAY_S: Final = 1.0
# Of UTF-8. It travels in headers, three times and encoded, and gRPC takes no more than 8 KiB of them.
MAX_MESSAGE_BYTES: Final = 1000
# Another replica may take what one refuses so; the same one may later.
RETRYABLE: Final = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)

_log = logging.getLogger(__name__)


class RequestError(Exception):
    """A request failed for a reason that its client may know.

    Args:
        code: Never OK.
        message: Names the value, the limit and what to do; cut after 1,000 bytes.
        reason: UPPER_SNAKE_CASE, for programs (google.rpc.ErrorInfo).
        field: Path of the field at fault, such as `spec.sampling.temperature` (google.rpc.BadRequest).
        retry_delay: Seconds after which trying again may help (google.rpc.RetryInfo).
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        *,
        reason: str,
        field: str = "",
        retry_delay: float | None = None,
    ) -> None:
        if len(encoded := message.encode(errors="replace")) > MAX_MESSAGE_BYTES:
            message = encoded[:MAX_MESSAGE_BYTES].decode(errors="ignore") + "…"
        super().__init__(message)
        self.code = code
        self.message = message
        self.reason = reason
        self.field = field
        self.retry_delay = retry_delay

    def status(self) -> Any:
        """A `grpc.Status` whose trailing metadata carry the details."""
        details: list[Message] = [error_details_pb2.ErrorInfo(reason=self.reason, domain=DOMAIN)]
        if self.field:
            violation = error_details_pb2.BadRequest.FieldViolation(
                field=self.field, description=self.message
            )
            details.append(error_details_pb2.BadRequest(field_violations=[violation]))
        if self.retry_delay is not None:
            delay = duration_pb2.Duration()
            delay.FromNanoseconds(int(self.retry_delay * 1e9))
            details.append(error_details_pb2.RetryInfo(retry_delay=delay))
        packed = [any_pb2.Any() for _ in details]
        for target, detail in zip(packed, details, strict=True):
            target.Pack(detail)
        message = f"{self.field}: {self.message}" if self.field else self.message
        return rpc_status.to_status(
            status_pb2.Status(code=self.code.value[0], message=message, details=packed)
        )


def invalid(field: str, message: str, reason: str = "INVALID_FIELD") -> RequestError:
    """INVALID_ARGUMENT on one field."""
    return RequestError(grpc.StatusCode.INVALID_ARGUMENT, message, reason=reason, field=field)


def unserved(field: str) -> RequestError:
    """UNIMPLEMENTED: the contract has the field, this version doesn't serve it."""
    message = "not served by this version; leave it unset"
    return RequestError(grpc.StatusCode.UNIMPLEMENTED, message, reason="NOT_SERVED_YET", field=field)


def unavailable(message: str, reason: str = "NO_REPLICA") -> RequestError:
    """UNAVAILABLE, with a hint to try again."""
    return RequestError(grpc.StatusCode.UNAVAILABLE, message, reason=reason, retry_delay=RETRY_DELAY_S)


def internal(what: str) -> RequestError:
    """INTERNAL for the exception that is being handled, which the log has under the incident it names."""
    incident = uuid.uuid4().hex
    _log.exception("%s failed, incident %s", what, incident)
    message = f"internal error; the router's log has more under incident {incident}"
    return RequestError(grpc.StatusCode.INTERNAL, message, reason="INTERNAL")


def from_refusal(refused: RequestRefused) -> RequestError:
    """A scheduler's refusal, as its client sees it."""
    code = failure_code(refused.code)
    delay = RETRY_DELAY_S if code in RETRYABLE else None
    if refused.HasField("retry_delay"):
        delay = refused.retry_delay.ToNanoseconds() / 1e9
    reason = f"SCHEDULER_{code.name}"
    return RequestError(code, refused.message, reason=reason, field=refused.field, retry_delay=delay)
