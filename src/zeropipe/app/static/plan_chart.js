// The chart of step time against peak memory: a small dot for every plan that fits, and the Pareto front to choose from.

import { ruler, timeText } from "/viewer/units.js";
import { svg } from "./dom.js";

const HEIGHT = 300;
const MARGIN = { top: 22, right: 14, bottom: 40, left: 58 };

export const gigabytes = (bytes, digits = 1) => `${(bytes / 1e9).toFixed(digits)} GB`;

export class PlanChart {
  /** `onSelect(row)` is called for a dot of the front. */
  constructor(root, onSelect) {
    this.onSelect = onSelect;
    this.picture = svg("svg", { class: "plan-chart", height: HEIGHT, role: "group", "aria-label": "Step time against peak memory" });
    root.append(this.picture);
    new ResizeObserver(() => this.draw()).observe(root);
  }

  show(answer) {
    this.answer = answer;
    this.selected = null;
    this.draw();
  }

  mark(row) {
    this.selected = row;
    this.draw();
  }

  draw() {
    const width = this.picture.parentNode.clientWidth;
    if (!this.answer || !width) return;
    const { dots, rows, memory_limit: limit } = this.answer;
    const front = rows.filter((row) => row.front).sort((a, b) => a.peak_memory - b.peak_memory);
    const maxMemory = Math.max(limit, ...dots.map(([memory]) => memory));
    const maxStep = Math.max(...dots.map(([, step]) => step), ...front.map((row) => row.step_seconds)) * 1.06;
    const floor = HEIGHT - MARGIN.bottom;
    const x = (memory) => MARGIN.left + (memory / maxMemory) * (width - MARGIN.left - MARGIN.right);
    const y = (step) => floor - (step / maxStep) * (floor - MARGIN.top);
    const parts = [];
    for (const { at } of ruler(0, maxStep, 5, "s").ticks) {
      parts.push(svg("line", { x1: MARGIN.left, x2: width - MARGIN.right, y1: y(at), y2: y(at) }));
      parts.push(svg("text", { x: MARGIN.left - 8, y: y(at) + 4, "text-anchor": "end" }, timeText(at, "s", 3)));
    }
    for (const { at } of ruler(0, maxMemory / 1e9, Math.max(2, width / 90), "").ticks) {
      parts.push(svg("text", { x: x(at * 1e9), y: floor + 18, "text-anchor": "middle" }, `${at} GB`));
    }
    parts.push(svg("text", { x: width - MARGIN.right, y: HEIGHT - 4, "text-anchor": "end" }, "peak memory of a GPU →"));
    parts.push(svg("text", { x: 0, y: 11 }, "↑ step"));
    parts.push(svg("line", { x1: x(limit), x2: x(limit), y1: MARGIN.top, y2: floor, class: "limit" }));
    for (const [memory, step] of dots) parts.push(svg("circle", { cx: x(memory), cy: y(step), r: 3, class: "speck" }));
    const line = front.map((row, n) => (n ? `H${x(row.peak_memory)}V${y(row.step_seconds)}` : `M${x(row.peak_memory)} ${y(row.step_seconds)}`)).join("");
    parts.push(svg("path", { d: line, class: "steps" }));
    for (const row of front) parts.push(this.dot(row, x(row.peak_memory), y(row.step_seconds)));
    if (this.selected) parts.push(svg("circle", { cx: x(this.selected.peak_memory), cy: y(this.selected.step_seconds), r: 8, class: "chosen" }));
    this.picture.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.picture.replaceChildren(...parts);
  }

  dot(row, cx, cy) {
    const text = `${row.schedule}, step ${timeText(row.step_seconds, "s", 3)}, ${gigabytes(row.peak_memory)}`;
    const node = svg("circle", { cx, cy, r: 5.5, class: "on-front", tabindex: "0", role: "button", "aria-label": text }, svg("title", {}, text));
    node.addEventListener("click", () => this.onSelect(row));
    node.addEventListener("keydown", (event) => (event.key === "Enter" || event.key === " ") && (event.preventDefault(), this.onSelect(row)));
    return node;
  }
}
