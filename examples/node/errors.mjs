// Errors with their details, which gRPC carries as a google.rpc.Status in the trailing metadata.

import grpc from "@grpc/grpc-js";
import protobuf from "protobufjs";

// Of google/rpc/status.proto and google/rpc/error_details.proto, what is used here.
const { root } = protobuf.parse(
  `syntax = "proto3";
  package google.rpc;
  message Any { string type_url = 1; bytes value = 2; }
  message Status { int32 code = 1; string message = 2; repeated Any details = 3; }
  message ErrorInfo { string reason = 1; string domain = 2; }
  message FieldViolation { string field = 1; string description = 2; }
  message BadRequest { repeated FieldViolation field_violations = 1; }
  message Duration { int64 seconds = 1; int32 nanos = 2; }
  message RetryInfo { Duration retry_delay = 1; }`,
  { keepCase: true },
);
const decode = (name, bytes) => root.lookupType(`google.rpc.${name}`).decode(bytes);

// The status in a line, and one for each detail that a program could act on.
export function describe(error) {
  const lines = [`${grpc.status[error.code]}: ${error.details}`];
  const [packed] = error.metadata?.get("grpc-status-details-bin") ?? [];
  for (const { type_url, value } of packed ? decode("Status", packed).details : []) {
    const name = type_url.split(".").pop();
    if (name === "ErrorInfo") {
      lines.push(`  reason: ${decode(name, value).reason}`);
    } else if (name === "BadRequest") {
      lines.push(...decode(name, value).field_violations.map(({ field }) => `  field: ${field}`));
    } else if (name === "RetryInfo") {
      const { seconds, nanos } = decode(name, value).retry_delay;
      lines.push(`  try again in ${Number(seconds) + nanos / 1e9} s`);
    }
  }
  return lines.join("\n");
}
