// A search for the best schedule of this size, in rounds that take longer and longer: the gap to the bound shrinks live.

import { percentText, sizeText, timeText } from "/viewer/units.js";
import { h, svg, tell } from "./dom.js";
import { Line, Refused } from "./wire.js";

const ROUNDS = [0.5, 1, 2, 4, 8]; // seconds
const LONG = 4000; // ms: no first answer by then is told why
const [WIDTH, HEIGHT] = [500, 150];

export class Searching {
  /** `size()` is what is asked for; `take(name, text)` gets the schedule that was found. */
  constructor(dialog, size, take) {
    this.dialog = dialog;
    this.size = size;
    this.line = new Line("/api/search");
    this.big = h("p", { className: "big", "aria-live": "polite" });
    this.words = h("p", { className: "note" });
    this.error = h("p", { className: "error", id: "error-search", role: "alert", hidden: true });
    this.picture = svg("svg", { class: "search-gap", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": "The gap over the seconds searched" });
    this.use = h("button", { type: "button", className: "strong", disabled: true, onclick: () => this.taken(take) }, "Compare it");
    this.stop = h("button", { type: "button", onclick: () => this.halt() }, "Stop");
    const close = h("button", { type: "button", className: "quiet", "aria-label": "Close", onclick: () => dialog.close() }, "×");
    dialog.append(h("header", {}, h("h2", { id: "search-title" }, "Search for the best schedule"), close),
      h("p", { className: "about" }, "For the ranks, microbatches, costs and memory limit of this page. The gap is how far the best one found is above what no schedule can beat."),
      this.big, this.words, this.picture, this.error, h("div", { className: "row" }, this.use, this.stop));
    dialog.addEventListener("close", () => this.halt());
  }

  async open() {
    this.dialog.showModal();
    this.best = null;
    this.bound = 0;
    this.spent = 0;
    this.seen = [];
    this.running = true;
    tell(this.error, "");
    this.show();
    clearTimeout(this.late);
    this.late = setTimeout(() => this.explain(), LONG);
    const size = this.size();
    for (const [round, seconds] of ROUNDS.entries()) {
      try {
        const answer = await this.line.ask({ ...size, seconds, seed: round });
        if (!answer || !this.running) return;
        this.add(answer);
      } catch (error) {
        if (!(error instanceof Refused)) throw error;
        tell(this.error, error.message);
        break;
      }
      if (this.gap === 0) break;
    }
    this.halt();
  }

  explain() {
    if (this.running && !this.best) this.words.textContent = "The first search after an installation compiles its kernels: about half a minute.";
  }

  add(answer) {
    this.bound = Math.max(this.bound, answer.bound);
    for (const [seconds, gap] of answer.seen) this.note(this.spent + seconds, gap);
    this.spent += answer.seconds;
    if (!this.best || answer.value < this.best.value) this.best = answer;
    this.note(this.spent, this.gap);
    this.show();
  }

  note(seconds, gap) {
    const before = this.seen.at(-1)?.[1] ?? Infinity;
    this.seen.push([seconds, Math.min(gap, before)]);
  }

  get gap() {
    return this.best.value <= this.bound * (1 + 1e-9) ? 0 : this.best.value / this.bound - 1;
  }

  show() {
    this.stop.disabled = !this.running;
    this.use.disabled = !this.best;
    this.dialog.dataset.state = this.running ? "searching" : "done";
    if (!this.best) {
      this.big.textContent = this.running ? "Searching" : "Nothing found";
      this.words.textContent = "";
      this.picture.replaceChildren();
      return;
    }
    const { value, unit, peak_memory, memory_unit, bubble, named, named_value } = this.best;
    this.big.textContent = this.gap === 0 ? "Proven best" : `${percentText(this.gap)} gap`;
    const rival = named ? `the best with a name, ${named}, takes ${percentText(named_value / value - 1)} more` : "no schedule with a name fits";
    this.words.textContent = `${timeText(value, unit)}, bubble ${percentText(bubble)}, peak memory ${sizeText(peak_memory, memory_unit)}; ${rival}; ${this.spent.toFixed(1)} s searched`;
    this.draw();
  }

  draw() {
    const most = Math.max(0.001, ...this.seen.map(([, gap]) => gap).filter(Number.isFinite));
    const last = Math.max(this.spent, 0.001);
    const x = (seconds) => 44 + (seconds / last) * (WIDTH - 54);
    const y = (gap) => HEIGHT - 24 - (Math.min(gap, most) / most) * (HEIGHT - 40);
    const line = this.seen.map(([seconds, gap], n) => (n ? `H${x(seconds)}V${y(gap)}` : `M${x(seconds)} ${y(gap)}`)).join("");
    this.picture.replaceChildren(
      svg("line", { x1: 44, x2: WIDTH - 10, y1: y(0), y2: y(0) }), svg("line", { x1: 44, x2: WIDTH - 10, y1: y(most), y2: y(most) }),
      svg("text", { x: 38, y: y(0) + 4, "text-anchor": "end" }, "0%"), svg("text", { x: 38, y: y(most) + 4, "text-anchor": "end" }, percentText(most)),
      svg("text", { x: WIDTH - 10, y: HEIGHT - 6, "text-anchor": "end" }, `${last.toFixed(1)} s`), svg("path", { d: line }));
  }

  halt() {
    this.running = false;
    this.line.drop();
    this.show();
  }

  async taken(take) {
    const { schedule } = this.best;
    this.dialog.close();
    await take("searched.json", schedule);
  }
}
