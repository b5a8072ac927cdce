// A search for the best schedule of this size, in rounds that take longer and longer, with a chart of the gap.

import { percentText, sizeText, timeText } from "/viewer/units.js";
import { LatestCall, RequestError } from "./api.js";
import { closeButton, h, showMessage, svg } from "./dom.js";

const ROUNDS = [0.5, 1, 2, 4, 8]; // seconds
const SLOW_START_MS = 4000; // after this time without an answer, the reason is shown
const [WIDTH, HEIGHT] = [500, 150];

export class SearchDialog {
  /** `size()` returns the request's sizes and costs; `use(name, text)` gets the schedule that was found. */
  constructor(dialog, size, use) {
    this.dialog = dialog;
    this.size = size;
    this.call = new LatestCall("/api/search");
    this.big = h("p", { className: "big", "aria-live": "polite" });
    this.note = h("p", { className: "note" });
    this.error = h("p", { className: "error", id: "error-search", role: "alert", hidden: true });
    this.picture = svg("svg", { class: "search-gap", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": "The gap over the seconds searched" });
    this.useButton = h("button", { type: "button", className: "strong", disabled: true, onclick: () => this.finish(use) }, "Compare it");
    this.stopButton = h("button", { type: "button", onclick: () => this.stop() }, "Stop");
    dialog.append(h("header", {}, h("h2", { id: "search-title" }, "Search for the best schedule"), closeButton(dialog)),
      h("p", { className: "about" }, "For the ranks, microbatches, stages per rank (one, if they are auto), costs and memory limit of this page. The gap is between the best schedule found and the proven lower bound of these."),
      this.big, this.note, this.picture, this.error, h("div", { className: "row" }, this.useButton, this.stopButton));
    dialog.addEventListener("close", () => this.stop());
  }

  async open() {
    this.dialog.showModal();
    this.best = null;
    this.bound = 0;
    this.seconds = 0;
    this.gaps = []; // [seconds, gap]
    this.isRunning = true;
    showMessage(this.error, "");
    this.show();
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.explainSlowStart(), SLOW_START_MS);
    const size = this.size();
    for (const [round, seconds] of ROUNDS.entries()) {
      try {
        const answer = await this.call.send({ ...size, seconds, seed: round });
        if (!answer || !this.isRunning) return;
        this.add(answer);
      } catch (error) {
        if (!(error instanceof RequestError)) throw error;
        showMessage(this.error, error.message);
        break;
      }
      if (this.gap === 0) break;
    }
    this.stop();
  }

  explainSlowStart() {
    if (this.isRunning && !this.best) this.note.textContent = "The first search after an installation compiles its kernels: about half a minute.";
  }

  add(answer) {
    this.bound = Math.max(this.bound, answer.bound);
    for (const [seconds, gap] of answer.seen) this.record(this.seconds + seconds, gap);
    this.seconds += answer.seconds;
    if (!this.best || answer.value < this.best.value) this.best = answer;
    this.record(this.seconds, this.gap);
    this.show();
  }

  record(seconds, gap) {
    const before = this.gaps.at(-1)?.[1] ?? Infinity;
    this.gaps.push([seconds, Math.min(gap, before)]);
  }

  get gap() {
    return this.best.value <= this.bound * (1 + 1e-9) ? 0 : this.best.value / this.bound - 1;
  }

  show() {
    this.stopButton.disabled = !this.isRunning;
    this.useButton.disabled = !this.best;
    this.dialog.dataset.state = this.isRunning ? "searching" : "done";
    if (!this.best) {
      this.big.textContent = this.isRunning ? "Searching" : "Nothing found";
      this.note.textContent = "";
      this.picture.replaceChildren();
      return;
    }
    const { value, unit, peak_memory, memory_unit, idle_fraction: idle, searched, named, named_value } = this.best;
    this.big.textContent = this.gap === 0 ? "Proven best" : `${percentText(this.gap)} gap`;
    const rival = named ? `the best built-in one, ${named}, takes ${percentText(named_value / value - 1)} more` : "no built-in one fits";
    this.note.textContent = `Of the ${searched}: ${timeText(value, unit)}, idle ${percentText(idle)}, peak memory ${sizeText(peak_memory, memory_unit)}; ${rival}; ${this.seconds.toFixed(1)} s searched`;
    this.draw();
  }

  draw() {
    const maxGap = Math.max(0.001, ...this.gaps.map(([, gap]) => gap).filter(Number.isFinite));
    const end = Math.max(this.seconds, 0.001);
    const x = (seconds) => 44 + (seconds / end) * (WIDTH - 54);
    const y = (gap) => HEIGHT - 24 - (Math.min(gap, maxGap) / maxGap) * (HEIGHT - 40);
    const line = this.gaps.map(([seconds, gap], n) => (n ? `H${x(seconds)}V${y(gap)}` : `M${x(seconds)} ${y(gap)}`)).join("");
    this.picture.replaceChildren(
      svg("line", { x1: 44, x2: WIDTH - 10, y1: y(0), y2: y(0) }), svg("line", { x1: 44, x2: WIDTH - 10, y1: y(maxGap), y2: y(maxGap) }),
      svg("text", { x: 38, y: y(0) + 4, "text-anchor": "end" }, "0%"), svg("text", { x: 38, y: y(maxGap) + 4, "text-anchor": "end" }, percentText(maxGap)),
      svg("text", { x: WIDTH - 10, y: HEIGHT - 6, "text-anchor": "end" }, `${end.toFixed(1)} s`), svg("path", { d: line }));
  }

  stop() {
    this.isRunning = false;
    this.call.cancel();
    this.show();
  }

  async finish(use) {
    const { schedule } = this.best;
    this.dialog.close();
    await use("searched.json", schedule);
  }
}
