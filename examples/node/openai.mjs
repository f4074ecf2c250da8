// Streams one answer through OpenAI's client.
//
//   npm ci && node openai.mjs URL PROMPT
//
// URL is that of the OpenAI-compatible API, such as http://127.0.0.1:8000/v1.

import OpenAI from "openai";

const [baseURL, prompt] = process.argv.slice(2);
if (prompt === undefined) {
  console.error("usage: node openai.mjs URL PROMPT");
  process.exit(2);
}

// The client insists on a key, whether or not the server asks for one.
const client = new OpenAI({ baseURL, apiKey: process.env.OPENAI_API_KEY ?? "none" });
const aborting = new AbortController();

// Leaving frees the request's memory at the server at once.
process.once("SIGINT", () => aborting.abort());

try {
  const [model] = (await client.models.list()).data;
  const stream = await client.chat.completions.create(
    {
      model: model.id,
      messages: [{ role: "user", content: prompt }],
      max_completion_tokens: 64,
      stream: true,
      stream_options: { include_usage: true },
    },
    { signal: aborting.signal, timeout: 60_000 },
  );
  for await (const { choices, usage } of stream) {
    process.stdout.write(choices[0]?.delta.content ?? "");
    if (usage) {
      console.log(`\n${usage.prompt_tokens} prompt tokens, ${usage.completion_tokens} completion tokens`);
    }
  }
  if (aborting.signal.aborted) process.exitCode = 130;
} catch (error) {
  const aborted = error instanceof OpenAI.APIUserAbortError;
  if (!aborted) console.error(`${error.constructor.name}: ${error.message}`);
  process.exitCode = aborted ? 130 : 1;
}
