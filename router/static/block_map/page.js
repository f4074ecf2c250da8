// Polls the block map and shows it. Request ids come from clients: they are only ever set as text.

import { Grid } from "./grid.js";

const POLL_MS = 250;
const HIDDEN_MS = 10_000;
const LONGEST_WAIT_MS = 5_000;
const FETCH_TIMEOUT_MS = 5_000;
const MOST_EVENTS = 200;
const MOST_LISTED = 200;
const ROW_HEIGHT = 28;
const STATES = ["running", "waiting", "paused", "swapped"];
const COUNTERS = ["preemptions", "copies", "evictions"];

const element = (id) => document.getElementById(id);
const dark = matchMedia("(prefers-color-scheme: dark)");
const still = matchMedia("(prefers-reduced-motion: reduce)");
const device = new Grid(element("device"), 44, showBlock);
const host = new Grid(element("host"), 16);

// A sequence's hue follows from its name; of two with one hue the later takes the next that is free.
const NUM_HUES = 24;
const hues = new Map();

// Before the first map of a scheduler has come.
const NOTHING = digest({
  block_size: 1, num_blocks: 0, num_host_blocks: 0, ref_counts: [], cached: [], sequences: [],
  preemptions: 0, copies: 0, evictions: 0, step: 0,
});

let map = NOTHING; // As fetched, with what `digest` adds.
let selected = null; // Key of a sequence.
let selectedName = "";
let schedulers = null;
let failures = 0;
let current = null; // The fetch under way.
let timer = 0;

// ---- Polling

async function poll() {
  clearTimeout(timer);
  current?.abort();
  const mine = (current = new AbortController());
  const timeout = setTimeout(() => mine.abort(), FETCH_TIMEOUT_MS);
  let fetched = null;
  let problem = null;
  try {
    if (schedulers === null) showSchedulers((await get("api/schedulers", mine.signal)).schedulers);
    fetched = await get(`api/map?scheduler=${element("scheduler").value}`, mine.signal);
  } catch (error) {
    problem = error instanceof ServerError ? `Scheduler: ${error.message}` : "The router doesn't answer";
    schedulers = null;
  }
  clearTimeout(timeout);
  // A later poll has taken over.
  if (mine !== current) return;
  failures = problem ? failures + 1 : 0;
  const wait = document.hidden ? HIDDEN_MS : Math.min(POLL_MS * 2 ** failures, LONGEST_WAIT_MS);
  showStatus(problem, wait);
  timer = setTimeout(poll, wait);
  if (fetched === null) return;
  const before = map;
  map = digest(fetched);
  show();
  if (before !== NOTHING) report(before, map);
}

class ServerError extends Error {}

async function get(path, signal) {
  const response = await fetch(path, { signal });
  const body = await response.json();
  if (!response.ok) throw new ServerError(body.error.message);
  return body;
}

function showStatus(problem, wait) {
  document.body.classList.toggle("stale", problem !== null);
  let text = document.hidden ? "Slowed while the tab is hidden" : "Live";
  if (problem) text = `${problem}; trying again every ${(wait / 1000).toFixed(1)} s`;
  setText(element("status"), text);
}

function showSchedulers(addresses) {
  schedulers = addresses;
  const items = addresses.map((address, index) => ({ key: String(index), name: `${index}: ${address}` }));
  reconcile(
    element("scheduler"),
    items,
    (item) => Object.assign(document.createElement("option"), { value: item.key }),
    (node, item) => setText(node, item.name),
  );
  element("scheduler-label").hidden = addresses.length < 2;
}

// ---- What a map means

// Gives each sequence a key, a name and a colour, and each block its holders.
function digest(fetched) {
  const seen = new Map();
  for (const sequence of fetched.sequences) {
    const name = `${sequence.request_id} #${sequence.output_index}`;
    // Two routers may use one id at the same time.
    const count = seen.get(name) ?? 0;
    seen.set(name, count + 1);
    sequence.key = `${name} ${count}`;
    sequence.name = name;
    sequence.onHost = sequence.state === "swapped";
  }
  colour(fetched.sequences);
  fetched.blocks = fetched.ref_counts.map((refCount) => ({ refCount, cached: false, holders: [] }));
  fetched.cached.forEach((block) => (fetched.blocks[block].cached = true));
  fetched.hostBlocks = Array.from({ length: fetched.num_host_blocks }, () => ({ refCount: 0, cached: false, holders: [] }));
  for (const sequence of fetched.sequences) {
    sequence.block_ids.forEach((id, logical) => {
      const block = (sequence.onHost ? fetched.hostBlocks : fetched.blocks)[id];
      block.holders.push({ sequence, logical, filled: filled(fetched, sequence, logical) });
      if (sequence.onHost) block.refCount += 1;
    });
  }
  return fetched;
}

function filled(fetched, sequence, logical) {
  const left = sequence.num_computed_tokens - logical * fetched.block_size;
  return Math.max(0, Math.min(fetched.block_size, left));
}

function colour(sequences) {
  const live = new Set(sequences.map((sequence) => sequence.key));
  for (const key of hues.keys()) if (!live.has(key)) hues.delete(key);
  const taken = new Set(hues.values());
  for (const { key } of sequences) {
    if (hues.has(key)) continue;
    let hue = hash(key) % NUM_HUES;
    for (let tries = 0; taken.has(hue) && tries < NUM_HUES; tries += 1) hue = (hue + 7) % NUM_HUES;
    hues.set(key, hue);
    taken.add(hue);
  }
  for (const sequence of sequences) {
    const hue = hues.get(sequence.key);
    // Against white at least 3:1, against the dark surface more; neighbours differ in lightness too.
    const lightness = (dark.matches ? 0.72 : 0.52) + (hue % 2) * 0.1;
    sequence.colour = `oklch(${lightness} 0.15 ${(hue * 360) / NUM_HUES})`;
  }
}

function hash(text) {
  let value = 2166136261;
  for (let index = 0; index < text.length; index += 1) {
    value = Math.imul(value ^ text.charCodeAt(index), 16777619);
  }
  return (value ^ (value >>> 15)) >>> 0;
}

// ---- Events

function report(before, after) {
  if (after.step < before.step) return addEvent("the scheduler was restarted");
  const was = new Map(before.sequences.map((sequence) => [sequence.key, sequence.state]));
  for (const name of COUNTERS) {
    const growth = after[name] - before[name];
    if (growth <= 0) continue;
    let text = `${growth} ${growth === 1 ? name.slice(0, -1) : name}`;
    if (name === "preemptions") {
      const victims = after.sequences.filter((one) => was.get(one.key) === "running" && one.state !== "running");
      if (victims.length) text += `: ${victims.map((one) => `${one.name} ${one.state}`).join(", ")}`;
    }
    addEvent(text);
    flash(element(name).parentElement);
  }
  for (const one of after.sequences) {
    const state = was.get(one.key);
    if (one.state === "running" && (state === "paused" || state === "swapped")) addEvent(`${one.name} goes on`);
  }
}

function addEvent(text) {
  const time = document.createElement("time");
  time.textContent = new Date().toLocaleTimeString("en-GB");
  const item = document.createElement("li");
  item.append(time, text);
  element("events").prepend(item);
  while (element("events").children.length > MOST_EVENTS) element("events").lastChild.remove();
}

function flash(node) {
  const colour = getComputedStyle(node).getPropertyValue("--flash");
  if (!still.matches) node.animate([{ backgroundColor: colour }, { backgroundColor: "transparent" }], 1200);
}

// ---- The page

function show() {
  const { blocks } = map;
  for (const name of ["step", ...COUNTERS]) setText(element(name), grouped(map[name]));
  const held = blocks.filter((block) => block.refCount);
  const cached = blocks.filter((block) => !block.refCount && block.cached).length;
  setText(element("num-used"), grouped(held.length));
  setText(element("num-shared"), grouped(held.filter((block) => block.refCount > 1).length));
  setText(element("num-cached"), grouped(cached));
  setText(element("num-free"), grouped(blocks.length - held.length - cached));
  setText(element("size"), blocks.length ? `${grouped(blocks.length)} blocks of ${map.block_size} tokens` : "");
  setText(element("host-size"), `${grouped(map.num_host_blocks)}, for swapped sequences`);
  element("host-section").hidden = !map.num_host_blocks;
  const chosen = chosenSequence();
  device.show(blocks, map.block_size, chosen && !chosen.onHost ? selected : null);
  host.show(map.hostBlocks, map.block_size, chosen?.onHost ? selected : null);
  showQueues();
  showTable();
  showBlock();
}

function showQueues() {
  const queues = STATES.map((key) => ({ key, members: map.sequences.filter((one) => one.state === key) }));
  reconcile(element("queues"), queues, createQueue, (node, { key, members }) => {
    setText(node.children[0], `${key[0].toUpperCase()}${key.slice(1)} (${members.length})`);
    reconcile(node.children[1], members.slice(0, MOST_LISTED), createItem, updateItem);
    setText(node.children[2], members.length > MOST_LISTED ? `and ${members.length - MOST_LISTED} more` : "");
  });
}

function createQueue() {
  const node = document.createElement("div");
  const more = Object.assign(document.createElement("p"), { className: "hint" });
  node.append(document.createElement("h3"), document.createElement("ul"), more);
  return node;
}

function createItem() {
  const button = Object.assign(document.createElement("button"), { type: "button", className: "sequence" });
  for (const name of ["swatch", "name", "figures"]) {
    button.append(Object.assign(document.createElement("span"), { className: name }));
  }
  const item = document.createElement("li");
  item.append(button);
  button.addEventListener("click", () => select(item.dataset.key));
  return item;
}

function updateItem(item, sequence, figures = queueFigures(sequence)) {
  const button = item.firstChild;
  button.setAttribute("aria-pressed", String(sequence.key === selected));
  button.children[0].style.background = sequence.block_ids.length ? sequence.colour : "";
  setText(button.children[1], sequence.name);
  button.children[1].title = sequence.name;
  setText(button.children[2], figures);
}

function queueFigures({ num_tokens: tokens, block_ids: blocks }) {
  return `${tokens} tokens, ${blocks.length} ${blocks.length === 1 ? "block" : "blocks"}`;
}

function select(key) {
  selected = key === selected ? null : key;
  selectedName = chosenSequence()?.name ?? "";
  element("scroller").scrollTop = 0;
  show();
}

function chosenSequence() {
  return map.sequences.find((one) => one.key === selected);
}

// Only the rows in view are there, so that the longest table costs no more than a short one.
function showTable() {
  const sequence = chosenSequence();
  setText(element("table-of"), tableTitle(sequence));
  setText(element("physical"), sequence?.onHost ? "Physical (host)" : "Physical");
  const ids = sequence?.block_ids ?? [];
  const scroller = element("scroller");
  scroller.hidden = !ids.length;
  const first = Math.max(0, Math.min(Math.floor(scroller.scrollTop / ROW_HEIGHT) - 5, ids.length - 1));
  const last = Math.min(ids.length, first + Math.ceil(scroller.clientHeight / ROW_HEIGHT) + 10);
  const rows = ids.slice(first, last).map((id, index) => ({ key: String(first + index), logical: first + index, id }));
  element("table").setAttribute("aria-rowcount", ids.length + 1);
  element("above").rows[0].cells[0].style.height = `${first * ROW_HEIGHT}px`;
  element("below").rows[0].cells[0].style.height = `${(ids.length - last) * ROW_HEIGHT}px`;
  reconcile(element("rows"), rows, createRow, (node, { logical, id }) => {
    const count = filled(map, sequence, logical);
    const [bar, text] = node.cells[2].children;
    node.setAttribute("aria-rowindex", logical + 2);
    setText(node.cells[0], logical);
    setText(node.cells[1], id);
    bar.firstChild.style.width = `${(100 * count) / map.block_size}%`;
    bar.firstChild.style.background = sequence.colour;
    setText(text, `${count} of ${map.block_size}`);
  });
}

function tableTitle(sequence) {
  if (selected === null) return "Choose a sequence to see its block table.";
  if (!sequence) return `${selectedName} has ended.`;
  const { state, num_computed_tokens: computed, num_tokens: tokens } = sequence;
  return `${sequence.name} is ${state}; ${computed} of ${tokens} tokens are computed.`;
}

function createRow() {
  const row = document.createElement("tr");
  for (let column = 0; column < 3; column += 1) row.append(document.createElement("td"));
  const bar = Object.assign(document.createElement("span"), { className: "bar" });
  bar.append(document.createElement("span"));
  row.cells[2].append(bar, document.createElement("span"));
  row.addEventListener("pointerenter", () => tableGrid().point(Number(row.cells[1].textContent)));
  row.addEventListener("pointerleave", () => tableGrid().point(null));
  return row;
}

function tableGrid() {
  return chosenSequence()?.onHost ? host : device;
}

// Who holds the block that is pointed at, or else the one that was picked.
function showBlock() {
  const id = device.pointed ?? device.picked;
  const block = map.blocks[id];
  const holders = block?.holders ?? [];
  setText(element("block-text"), block ? describe(id, block) : "");
  const items = holders.map((holder) => ({ ...holder, key: holder.sequence.key }));
  reconcile(element("holders"), items, createItem, (node, { sequence, logical, filled: count }) =>
    updateItem(node, sequence, `logical ${logical}, ${count} of ${map.block_size} filled`),
  );
}

function describe(id, block) {
  const cached = block.cached ? "; found by its hash" : "";
  if (block.refCount > 1) return `Block ${id} is shared by ${block.refCount} tables${cached}.`;
  if (block.refCount) return `Block ${id} is held by one table${cached}.`;
  return block.cached ? `Block ${id} is cached: held by nobody${cached}.` : `Block ${id} is free.`;
}

// ---- DOM

function setText(node, value) {
  const text = String(value);
  if (node.textContent !== text) node.textContent = text;
}

function grouped(number) {
  return number.toLocaleString("en-GB");
}

// Makes the children of `parent` those of `items`, in order, by `key`. Nodes stay, and with them the focus.
function reconcile(parent, items, create, update) {
  const wanted = new Set(items.map((item) => item.key));
  const present = new Map();
  for (const node of [...parent.children]) {
    if (wanted.has(node.dataset.key)) present.set(node.dataset.key, node);
    else node.remove();
  }
  items.forEach((item, index) => {
    let node = present.get(item.key);
    if (!node) {
      node = create(item);
      node.dataset.key = item.key;
    }
    if (parent.children[index] !== node) parent.insertBefore(node, parent.children[index] ?? null);
    update(node, item);
  });
}

element("scheduler").addEventListener("change", () => {
  map = NOTHING;
  selected = device.pointed = device.picked = null;
  show();
  poll();
});
element("scroller").addEventListener("scroll", showTable);
document.addEventListener("visibilitychange", poll);
poll();
