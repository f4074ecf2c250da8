// Streams one answer, with the messages read from the .proto files at run time.
//
//   npm ci && node stream.mjs ADDRESS PROMPT

import { readFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";
import { describe } from "./errors.mjs";

const [address, prompt] = process.argv.slice(2);
if (prompt === undefined) {
  console.error("usage: node stream.mjs ADDRESS PROMPT");
  process.exit(2);
}

const protos = join(dirname(fileURLToPath(import.meta.url)), "../../protos");
const definition = protoLoader.loadSync("pagoda/v1/inference.proto", {
  includeDirs: [protos],
  keepCase: true,
  longs: String,
  enums: String,
  // Without it, an empty string in a message would be undefined.
  defaults: true,
  oneofs: true,
});
const { InferenceService } = grpc.loadPackageDefinition(definition).pagoda.v1;

const client = new InferenceService(address, grpc.credentials.createInsecure(), {
  // gRPC sends a call again, with backoff, that no server took.
  "grpc.service_config": readFileSync(join(protos, "pagoda/v1/service_config.json"), "utf8"),
});
const spec = { chat: { messages: [{ role: "user", content: prompt }] }, stop: { max_tokens: 64 } };
const call = client.GenerateStream({ spec }, { deadline: Date.now() + 60_000 });

// Cancelling frees the request's memory at the server at once.
process.once("SIGINT", () => call.cancel());

call.on("data", (response) => {
  if (response.event === "delta") {
    process.stdout.write(response.delta.text);
  } else if (response.event === "usage") {
    const { prompt_tokens, completion_tokens } = response.usage;
    console.log(`\n${prompt_tokens} prompt tokens, ${completion_tokens} completion tokens`);
  }
});
call.on("error", (error) => {
  const cancelled = error.code === grpc.status.CANCELLED;
  if (!cancelled) console.error(describe(error));
  process.exitCode = cancelled ? 130 : 1;
});
call.on("close", () => client.close());
