// Step time against peak memory: a speck for everything that fits, the front as dots that can be chosen.

import { ruler, timeText } from "/viewer/units.js";
import { svg } from "./dom.js";

const HEIGHT = 300;
const MARGIN = { top: 22, right: 14, bottom: 40, left: 58 };

export const gigabytes = (bytes, digits = 1) => `${(bytes / 1e9).toFixed(digits)} GB`;

export class PlanChart {
  /** `choose(row)` is called with the row of a dot. */
  constructor(root, choose) {
    this.choose = choose;
    this.picture = svg("svg", { class: "plan-chart", height: HEIGHT, role: "group", "aria-label": "Step time against peak memory" });
    root.append(this.picture);
    new ResizeObserver(() => this.draw()).observe(root);
  }

  show(answer) {
    this.answer = answer;
    this.chosen = null;
    this.draw();
  }

  mark(row) {
    this.chosen = row;
    this.draw();
  }

  draw() {
    const width = this.picture.parentNode.clientWidth;
    if (!this.answer || !width) return;
    const { dots, rows, limit } = this.answer;
    const front = rows.filter((row) => row.front).sort((a, b) => a.peak - b.peak);
    const most = Math.max(limit, ...dots.map(([memory]) => memory));
    const slowest = Math.max(...dots.map(([, step]) => step), ...front.map((row) => row.step)) * 1.06;
    const floor = HEIGHT - MARGIN.bottom;
    const x = (memory) => MARGIN.left + (memory / most) * (width - MARGIN.left - MARGIN.right);
    const y = (step) => floor - (step / slowest) * (floor - MARGIN.top);
    const parts = [];
    for (const { at } of ruler(0, slowest, 5, "s").ticks) {
      parts.push(svg("line", { x1: MARGIN.left, x2: width - MARGIN.right, y1: y(at), y2: y(at) }));
      parts.push(svg("text", { x: MARGIN.left - 8, y: y(at) + 4, "text-anchor": "end" }, timeText(at, "s", 3)));
    }
    for (const { at } of ruler(0, most / 1e9, Math.max(2, width / 90), "").ticks) {
      parts.push(svg("text", { x: x(at * 1e9), y: floor + 18, "text-anchor": "middle" }, `${at} GB`));
    }
    parts.push(svg("text", { x: width - MARGIN.right, y: HEIGHT - 4, "text-anchor": "end" }, "peak memory of a GPU →"));
    parts.push(svg("text", { x: 0, y: 11 }, "↑ step"));
    parts.push(svg("line", { x1: x(limit), x2: x(limit), y1: MARGIN.top, y2: floor, class: "limit" }));
    for (const [memory, step] of dots) parts.push(svg("circle", { cx: x(memory), cy: y(step), r: 3, class: "speck" }));
    const line = front.map((row, n) => (n ? `H${x(row.peak)}V${y(row.step)}` : `M${x(row.peak)} ${y(row.step)}`)).join("");
    parts.push(svg("path", { d: line, class: "steps" }));
    for (const row of front) parts.push(this.dot(row, x(row.peak), y(row.step)));
    if (this.chosen) parts.push(svg("circle", { cx: x(this.chosen.peak), cy: y(this.chosen.step), r: 8, class: "chosen" }));
    this.picture.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.picture.replaceChildren(...parts);
  }

  dot(row, cx, cy) {
    const said = `${row.schedule}, step ${timeText(row.step, "s", 3)}, ${gigabytes(row.peak)}`;
    const node = svg("circle", { cx, cy, r: 5.5, class: "on-front", tabindex: "0", role: "button", "aria-label": said }, svg("title", {}, said));
    node.addEventListener("click", () => this.choose(row));
    node.addEventListener("keydown", (event) => (event.key === "Enter" || event.key === " ") && (event.preventDefault(), this.choose(row)));
    return node;
  }
}
