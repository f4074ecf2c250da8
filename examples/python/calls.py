"""What the programs here share: retries, and errors with their details."""

from pathlib import Path

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

SERVICE_CONFIG = Path(__file__).parents[2] / "protos" / "pagoda" / "v1" / "service_config.json"
# gRPC sends a call again, with backoff, that no server took.
CHANNEL_OPTIONS = (("grpc.service_config", SERVICE_CONFIG.read_text()),)


def describe(error: grpc.RpcError) -> str:
    """The status in a line, and one for each detail that a program could act on."""
    lines = [f"{error.code().name}: {error.details()}"]
    status = rpc_status.from_call(error)  # type: ignore[arg-type]
    for detail in status.details if status else ():
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            info = error_details_pb2.ErrorInfo.FromString(detail.value)
            lines.append(f"  reason: {info.reason}")
        elif detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            bad = error_details_pb2.BadRequest.FromString(detail.value)
            lines += [f"  field: {violation.field}" for violation in bad.field_violations]
        elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            retry = error_details_pb2.RetryInfo.FromString(detail.value)
            lines.append(f"  try again in {retry.retry_delay.ToTimedelta().total_seconds():g} s")
    return "\n".join(lines)
