// A conversation with the model. What it says is only ever set as text.

import { ApiError, getModel, streamChat } from "./api.js";
import { render } from "./markdown.js";

const RETRY_MS = 2_000;
const KEY = "pagoda-api-key";
// Nearer to the end than this, the view follows the answer.
const FOLLOW_PX = 60;

const element = (id) => document.getElementById(id);
const turns = element("turns");
const question = element("question");

let model = null; // As the API lists it.
let messages = []; // What was said, as the API wants it; no system message.
let answering = null; // The AbortController of the answer under way.

// ---- Start

async function connect() {
  try {
    model = await getModel(sessionStorage.getItem(KEY));
  } catch (error) {
    if (error.status === 401) askForKey(error);
    else {
      showStatus(error.message, "stale");
      setTimeout(connect, RETRY_MS);
    }
    return;
  }
  element("key-form").hidden = true;
  element("model").textContent = `${model.id}, ${grouped(model.max_model_len)} tokens of context`;
  element("max-tokens").max = model.max_model_len;
  showContext(0);
  showStatus("Ready");
}

function askForKey(error) {
  const wrong = sessionStorage.getItem(KEY) !== null;
  sessionStorage.removeItem(KEY);
  element("key-form").hidden = false;
  element("key").focus();
  showStatus(wrong ? error.message : "An API key is needed", "stale");
}

// The block map has an address of its own; one on loopback is of use on that machine alone.
async function linkBlockMap() {
  const { block_map_address: address } = await (await fetch("chat/config.json")).json();
  if (!address) return;
  const url = new URL(`http://${address}/`);
  const local = (host) => ["localhost", "127.0.0.1", "[::1]"].includes(host);
  if (["0.0.0.0", "[::]"].includes(url.hostname)) url.hostname = location.hostname;
  if (local(url.hostname) && !local(location.hostname)) return;
  element("block-map").href = url.href;
  element("block-map").hidden = false;
}

// ---- Asking

async function ask() {
  const content = question.value.trim();
  if (!content || answering || !model || !settingsAreRight()) return;
  const controller = (answering = new AbortController());
  const mine = messages;
  mine.push({ role: "user", content });
  addTurn("user", "You").text.textContent = content;
  question.value = "";
  fitQuestion();
  const turn = addTurn("assistant", model.id);
  const answer = { content: "", usage: null, reason: null, asked: performance.now(), first: null, last: null };
  showBusy(true);
  const drawing = draw(turn, answer);
  let failure = null;
  try {
    const body = { model: model.id, messages: withSystem(mine), ...settings() };
    for await (const chunk of streamChat(body, sessionStorage.getItem(KEY), controller.signal)) {
      take(answer, chunk);
      drawing.soon();
    }
  } catch (error) {
    if (controller.signal.aborted) answer.reason = "stopped";
    else failure = error;
  }
  answering = null;
  drawing.end();
  // What was said so far is part of the conversation; a question without an answer isn't.
  if (answer.content) mine.push({ role: "assistant", content: answer.content });
  else mine.pop();
  showBusy(false);
  if (failure) fail(turn, failure, answer.content ? "" : content);
}

function settingsAreRight() {
  const wrong = element("right").querySelector("input:invalid");
  if (wrong) element("right").open = true;
  return wrong?.reportValidity() ?? true;
}

function settings() {
  const { valueAsNumber: temperature } = element("temperature");
  const { valueAsNumber: tokens } = element("max-tokens");
  return {
    ...(Number.isNaN(temperature) ? {} : { temperature }),
    ...(Number.isNaN(tokens) ? {} : { max_completion_tokens: tokens }),
    // With each chunk, as an answer that is stopped has no last one.
    stream_options: { include_usage: true, continuous_usage_stats: true },
  };
}

function withSystem(said) {
  const content = element("system").value.trim();
  return content ? [{ role: "system", content }, ...said] : said;
}

// Usage, times in ms, and text.
function take(answer, { choices: [choice], usage }) {
  answer.usage = usage ?? answer.usage;
  answer.reason = choice?.finish_reason ?? answer.reason;
  if (!choice?.delta.content) return;
  answer.content += choice.delta.content;
  answer.last = performance.now();
  answer.first ??= { at: answer.last, tokens: usage?.completion_tokens ?? 1 };
}

function fail(turn, error, unanswered) {
  if (!(error instanceof ApiError)) throw error;
  turn.error.textContent = error.message;
  turn.error.hidden = false;
  if (!question.value) question.value = unanswered;
  fitQuestion();
  if (error.status === 401) askForKey(error);
}

function startAnew() {
  answering?.abort();
  messages = [];
  for (const node of turns.querySelectorAll(".turn")) node.remove();
  element("empty").hidden = false;
  showContext(0);
  question.focus();
}

// ---- Showing

function addTurn(role, name) {
  const node = Object.assign(document.createElement("article"), { className: `turn ${role}` });
  const heading = Object.assign(document.createElement("h2"), { textContent: name });
  const [text, figures, error] = ["text", "figures", "error"].map((className) =>
    Object.assign(document.createElement(className === "text" ? "div" : "p"), { className }),
  );
  error.setAttribute("role", "alert");
  figures.hidden = error.hidden = true;
  node.append(heading, text, figures, error);
  element("empty").hidden = true;
  turns.append(node);
  turns.scrollTop = turns.scrollHeight;
  return { text, figures, error };
}

// Draws at most once a frame, however many chunks come.
function draw(turn, answer) {
  let frame = 0;
  const now = () => {
    frame = 0;
    const following = turns.scrollHeight - turns.scrollTop - turns.clientHeight < FOLLOW_PX;
    render(turn.text, answer.content);
    turn.figures.textContent = figures(answer).join(" · ");
    turn.figures.hidden = !turn.figures.textContent;
    if (answer.usage && turn.text.isConnected) showContext(answer.usage.total_tokens);
    if (following) turns.scrollTop = turns.scrollHeight;
  };
  return {
    soon: () => (frame ||= requestAnimationFrame(now)),
    end: () => {
      cancelAnimationFrame(frame);
      now();
    },
  };
}

function figures({ usage, reason, asked, first, last }) {
  const texts = [];
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens;
    texts.push(`${grouped(usage.prompt_tokens)} prompt tokens${cached ? ` (${grouped(cached)} cached)` : ""}`);
    texts.push(`${grouped(usage.completion_tokens)} output tokens`);
  }
  if (first) texts.push(`first token after ${((first.at - asked) / 1000).toFixed(2)} s`);
  const rate = usage && first ? ((usage.completion_tokens - first.tokens) * 1000) / (last - first.at) : NaN;
  if (Number.isFinite(rate)) texts.push(`${rate.toFixed(1)} tokens/s`);
  if (reason === "length") texts.push("cut by the token limit");
  if (reason === "stopped") texts.push("stopped");
  return texts;
}

function showContext(tokens) {
  const most = model?.max_model_len ?? 0;
  element("context").textContent = most ? `${grouped(tokens)} of ${grouped(most)} tokens` : "–";
  element("context-bar").style.width = `${most ? (100 * tokens) / most : 0}%`;
}

function showBusy(busy) {
  element("send").hidden = busy;
  element("stop").hidden = !busy;
  turns.setAttribute("aria-busy", String(busy));
  showStatus(busy ? "Answering …" : "Ready", busy ? "busy" : "");
  question.focus();
}

function showStatus(text, state = "") {
  document.body.className = state;
  element("status").textContent = text;
}

function fitQuestion() {
  question.style.height = "auto";
  question.style.height = `${question.scrollHeight}px`;
}

function grouped(number) {
  return number.toLocaleString("en-GB");
}

// ---- Events

element("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  ask();
});
element("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, element("key").value.trim());
  element("key").value = "";
  connect();
});
element("stop").addEventListener("click", () => answering?.abort());
element("new").addEventListener("click", startAnew);
question.addEventListener("input", fitQuestion);
question.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  ask();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") answering?.abort();
});

const wide = matchMedia("(min-width: 60.01rem)");
const unfold = () => (element("right").open = wide.matches);
wide.addEventListener("change", unfold);
unfold();
connect();
linkBlockMap().catch(() => {}); // Without an answer there is no link.
question.focus();
