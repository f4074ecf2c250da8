// The little of Markdown that models write in chats, as nodes. All text is text: markup in it stays what it is.

// Bounded, so that no answer costs more than a constant per character.
const INLINE =
  /`([^`\n]{1,2000})`|\*\*(?=\S)([^*\n]{1,2000})\*\*|(?<!\w)\*(?=\S)([^*\n]{1,2000})\*|\[([^\][\n]{1,500})\]\(([^\s()<>]{1,2000})\)|(https?:\/\/[^\s<>()"'`*]{1,2000})/g;
const FENCE = /^ {0,3}(`{3,}|~{3,})/;
const HEADING = /^#{1,6} +(.*)$/;
const ITEM = /^ *(?:([-*+])|(\d{1,9})[.)]) +(.*)$/;

// Makes the children of `parent` those of `text`. Blocks that didn't change since the last call keep their nodes.
export function render(parent, text) {
  const found = blocks(text);
  found.forEach((block, index) => {
    const node = parent.children[index];
    const key = JSON.stringify(block);
    if (node?.block === key) return;
    const made = Object.assign(create(block), { block: key });
    if (node) node.replaceWith(made);
    else parent.append(made);
  });
  // More text may join what were several blocks.
  while (parent.children.length > found.length) parent.lastChild.remove();
}

// { kind: "pre", lines } | { kind: "h3" | "p", lines } | { kind: "ul" | "ol", start, lines }, a line per item.
function blocks(text) {
  const found = [];
  let fence = null;
  let open = null; // The paragraph or list that the next line may go on with.
  for (const line of text.split("\n")) {
    const mark = FENCE.exec(line)?.[1];
    if (fence) {
      if (mark?.startsWith(fence) && !line.trim().slice(mark.length)) fence = null;
      else found.at(-1).lines.push(line);
    } else if (mark) {
      fence = mark;
      open = null;
      found.push({ kind: "pre", lines: [] });
    } else {
      open = take(found, open, line);
    }
  }
  return found;
}

function take(found, open, line) {
  const begin = (block) => {
    found.push(block);
    return block;
  };
  const heading = HEADING.exec(line);
  const item = ITEM.exec(line);
  if (heading) {
    begin({ kind: "h3", lines: [heading[1]] });
    return null;
  }
  if (item) {
    const kind = item[1] ? "ul" : "ol";
    if (open?.kind === kind) open.lines.push(item[3]);
    return open?.kind === kind ? open : begin({ kind, start: Number(item[2] ?? 1), lines: [item[3]] });
  }
  // Blank lines end a paragraph; between the items of a list they mean nothing.
  if (!line.trim()) return open?.kind === "p" ? null : open;
  if (open?.kind === "p") {
    open.lines.push(line);
    return open;
  }
  // A line that is indented belongs to the item above it.
  if (open && /^ {2,}/.test(line)) {
    open.lines.push(`${open.lines.pop()}\n${line.trim()}`);
    return open;
  }
  return begin({ kind: "p", lines: [line] });
}

function create({ kind, start, lines }) {
  const node = document.createElement(kind);
  if (kind === "pre") {
    node.tabIndex = 0;
    node.append(element("code", lines.join("\n")));
  } else if (kind === "ul" || kind === "ol") {
    if (kind === "ol") node.start = start;
    for (const line of lines) node.append(fill(document.createElement("li"), line));
  } else {
    fill(node, lines.join("\n"));
  }
  return node;
}

function fill(node, text) {
  let done = 0;
  for (const match of text.matchAll(INLINE)) {
    const [whole, code, strong, emphasis, label, target, address] = match;
    node.append(broken(text.slice(done, match.index)));
    done = match.index + whole.length;
    if (code) node.append(element("code", code));
    else if (strong) node.append(fill(document.createElement("strong"), strong));
    else if (emphasis) node.append(fill(document.createElement("em"), emphasis));
    else node.append(link(label ?? address, target ?? address) ?? whole);
  }
  node.append(broken(text.slice(done)));
  return node;
}

// Text with its line breaks.
function broken(text) {
  const fragment = document.createDocumentFragment();
  text.split("\n").forEach((line, index) => {
    if (index) fragment.append(document.createElement("br"));
    fragment.append(line);
  });
  return fragment;
}

// Only to web pages, which learn nothing of this one.
function link(label, target) {
  const url = URL.canParse(target) ? new URL(target) : null;
  if (url?.protocol !== "http:" && url?.protocol !== "https:") return null;
  return Object.assign(element("a", label), { href: url.href, target: "_blank", rel: "noopener noreferrer" });
}

function element(name, text) {
  return Object.assign(document.createElement(name), { textContent: text });
}
