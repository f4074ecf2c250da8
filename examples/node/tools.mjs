// Has the model call a function, and streams its answer to what the function returned.
//
//   npm ci && node tools.mjs URL PROMPT
//
// URL is that of the OpenAI-compatible API, such as http://127.0.0.1:8000/v1.

import OpenAI from "openai";

const [baseURL, prompt] = process.argv.slice(2);
if (prompt === undefined) {
  console.error("usage: node tools.mjs URL PROMPT");
  process.exit(2);
}

const parameters = {
  type: "object",
  properties: { city: { type: "string", maxLength: 20 }, unit: { enum: ["celsius", "fahrenheit"] } },
  required: ["city", "unit"],
};
const tools = [{ type: "function", function: { name: "weather", description: "The weather of a city", parameters } }];

// Whatever the model gives is valid under the schema, but no more to be trusted than what a user types.
function weather({ city, unit }) {
  return `It is ${unit === "celsius" ? "18 °C" : "64 °F"} and sunny in ${city}.`;
}

// The client insists on a key, whether or not the server asks for one.
const client = new OpenAI({ baseURL, apiKey: process.env.OPENAI_API_KEY ?? "none" });

try {
  const [{ id: model }] = (await client.models.list()).data;
  const messages = [{ role: "user", content: prompt }];
  const shared = { model, tools, max_completion_tokens: 100 };
  const asked = await client.chat.completions.create({
    ...shared,
    messages,
    tool_choice: "required",
    parallel_tool_calls: false,
  });
  const { message, finish_reason: reason } = asked.choices[0];
  if (reason !== "tool_calls") throw new Error(`the call was cut off: ${reason}`);
  const [call] = message.tool_calls;
  const result = weather(JSON.parse(call.function.arguments));
  console.log(`${call.function.name}(${call.function.arguments}): ${result}`);

  messages.push(message, { role: "tool", tool_call_id: call.id, content: result });
  for await (const { choices } of await client.chat.completions.create({ ...shared, messages, stream: true })) {
    process.stdout.write(choices[0]?.delta.content ?? "");
  }
  console.log();
} catch (error) {
  console.error(`${error.constructor.name}: ${error.message}`);
  process.exitCode = 1;
}
