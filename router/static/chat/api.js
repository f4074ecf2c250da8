// The OpenAI-compatible API, as this page uses it.

// Why there is no answer. `status` is that of HTTP, or 0 for what has none.
export class ApiError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

// The first model that is served: { id, max_model_len }.
export async function getModel(key) {
  const response = await request("v1/models", { headers: headers(key) });
  return (await response.json()).data[0];
}

// Yields the chunks of a chat's answer until it is whole. Throws an ApiError, or the signal's reason if aborted.
export async function* streamChat(body, key, signal) {
  const response = await request("v1/chat/completions", {
    method: "POST",
    headers: { ...headers(key), "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true }),
    signal,
  });
  for await (const { event, data } of events(response.body)) {
    if (data === "[DONE]") return;
    if (event === "error") throw new ApiError(message(data) ?? "The answer broke off.");
    yield JSON.parse(data);
  }
  throw new ApiError("The connection ended before the answer did.");
}

function headers(key) {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function request(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new ApiError("The server doesn't answer.");
  }
  if (response.ok) return response;
  throw new ApiError(message(await response.text()) ?? `The server answered with HTTP ${response.status}.`, response.status);
}

// Of { error: { message } }; proxies send other things.
function message(text) {
  try {
    return JSON.parse(text).error.message;
  } catch {
    return null;
  }
}

// Server-sent events, comments left out: { event, data }.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let event = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read().catch(broken);
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines.map((one) => one.replace(/\r$/, ""))) {
        if (line === "") {
          if (data.length) yield { event, data: data.join("\n") };
          [event, data] = ["", []];
        } else if (line.startsWith("data:")) {
          data.push(line.slice(5).replace(/^ /, ""));
        } else if (line.startsWith("event:")) {
          event = line.slice(6).trim();
        }
      }
    }
  } finally {
    // Whoever stops reading lets the server stop writing.
    reader.cancel().catch(() => {});
  }
}

function broken(error) {
  throw error.name === "AbortError" ? error : new ApiError("The connection broke before the answer ended.");
}
