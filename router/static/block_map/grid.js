// A pool's physical blocks on one canvas; a DOM node for each would not bear 12,000 of them.

const SMALLEST_CELL = 3;
const NUMBERED_FROM = 26;

export class Grid {
  // Calls `onChoice` when another block is `pointed` at, by pointer or arrow keys, or `picked` by click or Enter.
  constructor(canvas, largestCell, onChoice = () => {}) {
    this.canvas = canvas;
    this.largestCell = largestCell;
    this.blocks = [];
    this.blockSize = 1;
    this.selected = null;
    this.pointed = null;
    this.picked = null;
    this.onChoice = onChoice;
    canvas.addEventListener("pointermove", (event) => this.point(this.#at(event)));
    canvas.addEventListener("pointerleave", () => this.point(null));
    canvas.addEventListener("click", (event) => this.#pick(this.#at(event)));
    canvas.addEventListener("keydown", (event) => this.#key(event));
    new ResizeObserver(() => this.draw()).observe(canvas.parentElement);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  // `blocks`: per physical block { holders: [{ sequence: { key, colour }, filled }], refCount, cached };
  // `selected`: the key of a sequence, or null.
  show(blocks, blockSize, selected) {
    this.blocks = blocks;
    this.blockSize = blockSize;
    this.selected = selected;
    this.draw();
  }

  point(block) {
    if (block === this.pointed) return;
    this.pointed = block;
    this.draw();
    this.onChoice();
  }

  draw() {
    const width = this.canvas.parentElement.clientWidth;
    if (!width) return;
    this.#layOut(width, this.blocks.length);
    const scale = window.devicePixelRatio || 1;
    const height = Math.max(1, Math.ceil(this.blocks.length / this.columns)) * this.cell;
    const [pixelWidth, pixelHeight] = [Math.round(width * scale), Math.round(height * scale)];
    if (this.canvas.width !== pixelWidth || this.canvas.height !== pixelHeight) {
      this.canvas.width = pixelWidth;
      this.canvas.height = pixelHeight;
      this.canvas.style.width = `${width}px`;
      this.canvas.style.height = `${height}px`;
    }
    const context = this.canvas.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, width, height);
    const style = getComputedStyle(document.documentElement);
    const theme = Object.fromEntries(
      ["text", "surface", "free", "cached"].map((name) => [name, style.getPropertyValue(`--${name}`)]),
    );
    this.blocks.forEach((block, index) => this.#drawBlock(context, theme, block, index));
    for (const block of [this.pointed, this.picked]) {
      if (block !== null && block < this.blocks.length) this.#outline(context, theme.text, block, 2);
    }
  }

  // The largest cells with which all blocks fit the width and most of the window.
  #layOut(width, count) {
    const room = Math.max(240, window.innerHeight * 0.55);
    this.cell = this.largestCell;
    while (this.cell > SMALLEST_CELL && Math.ceil(count / Math.floor(width / this.cell)) * this.cell > room) {
      this.cell -= 1;
    }
    this.columns = Math.max(1, Math.floor(width / this.cell));
  }

  #corner(index) {
    return [(index % this.columns) * this.cell, Math.floor(index / this.columns) * this.cell];
  }

  #drawBlock(context, theme, block, index) {
    const [x, y] = this.#corner(index);
    const size = this.cell - (this.cell > 12 ? 2 : 1);
    const [first, second] = block.holders;
    const mine = block.holders.some((holder) => holder.sequence.key === this.selected);
    context.fillStyle = theme.free;
    context.fillRect(x, y, size, size);
    if (block.refCount) {
      context.globalAlpha = this.selected !== null && !mine ? 0.3 : 1;
      const colour = first ? first.sequence.colour : theme.cached;
      const level = first && size > 8 ? Math.min(1, first.filled / this.blockSize) : 1;
      const dimmed = context.globalAlpha;
      context.fillStyle = colour;
      context.globalAlpha = 0.3 * dimmed;
      context.fillRect(x, y, size, size);
      context.globalAlpha = dimmed;
      context.fillRect(x, y + size * (1 - level), size, size * level);
      if (block.refCount > 1) this.#drawShared(context, theme, x, y, size, (second ?? first)?.sequence.colour ?? colour);
      context.globalAlpha = 1;
      if (mine) this.#outline(context, theme.text, index, size > 8 ? 2 : 1);
    } else if (block.cached) {
      this.#drawStripes(context, theme.cached, x, y, size);
    }
    if (this.cell >= NUMBERED_FROM) this.#drawNumber(context, theme, x, y, index);
  }

  // Its lower right half in the colour of another holder, and a hole in the middle.
  #drawShared(context, theme, x, y, size, colour) {
    context.fillStyle = colour;
    context.beginPath();
    context.moveTo(x + size, y);
    context.lineTo(x + size, y + size);
    context.lineTo(x, y + size);
    context.fill();
    context.fillStyle = theme.surface;
    context.beginPath();
    context.arc(x + size / 2, y + size / 2, Math.max(0.8, size * 0.17), 0, 2 * Math.PI);
    context.fill();
  }

  #drawStripes(context, colour, x, y, size) {
    const gap = Math.max(3, Math.round(size / 4));
    context.strokeStyle = colour;
    context.lineWidth = size > 12 ? 1.5 : 1;
    context.beginPath();
    for (let offset = gap / 2; offset < 2 * size; offset += gap) {
      const over = Math.max(0, offset - size);
      context.moveTo(x + over, y + offset - over);
      context.lineTo(x + offset - over, y + over);
    }
    context.stroke();
  }

  // With a halo, so that it can be read on any colour.
  #drawNumber(context, theme, x, y, index) {
    context.font = "600 10px system-ui, sans-serif";
    context.textBaseline = "top";
    context.lineJoin = "round";
    context.lineWidth = 3;
    context.strokeStyle = theme.surface;
    context.strokeText(index, x + 4, y + 4);
    context.fillStyle = theme.text;
    context.fillText(index, x + 4, y + 4);
  }

  #outline(context, colour, index, width) {
    const [x, y] = this.#corner(index);
    const size = this.cell - (this.cell > 12 ? 2 : 1);
    context.strokeStyle = colour;
    context.lineWidth = width;
    context.strokeRect(x + width / 2, y + width / 2, size - width, size - width);
  }

  #at(event) {
    const column = Math.floor(event.offsetX / this.cell);
    const index = Math.floor(event.offsetY / this.cell) * this.columns + column;
    return column >= 0 && column < this.columns && index >= 0 && index < this.blocks.length ? index : null;
  }

  #pick(block) {
    this.picked = block === this.picked ? null : block;
    this.draw();
    this.onChoice();
  }

  #key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns }[event.key];
    if (step) {
      const block = this.pointed === null ? 0 : this.pointed + step;
      if (block >= 0 && block < this.blocks.length) this.point(block);
    } else if (event.key === "Enter" || event.key === " ") {
      this.#pick(this.pointed);
    } else {
      return;
    }
    event.preventDefault();
  }
}
