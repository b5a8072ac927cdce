// The chart of idle time against peak memory: all schedules at this size, and their Pareto front.

import { percentText, ruler, sizeText, timeText } from "/viewer/units.js";
import { h, svg } from "./dom.js";
import { placeLabels } from "./labels.js";

const HEIGHT = 320;
const MARGIN = { top: 26, right: 16, bottom: 42 };
const MIN_LEFT = 44; // beside the labels of idle time
const LABEL_SIZE = 7; // pixels of a character, at most
const RADIUS = 5;
const MIN_LOG_RATIO = 10; // largest over smallest memory from which the scale is logarithmic

export class Chart {
  constructor(root, toggle) {
    this.root = root;
    this.toggle = toggle;
    this.chosen = [];
    this.extra = [];
    this.picture = svg("svg", { class: "chart", height: HEIGHT, role: "group", "aria-label": "Idle time against peak memory" });
    this.card = h("div", { className: "tip", hidden: true });
    this.message = h("p", { className: "error", role: "alert", hidden: true });
    this.legend = h("p", { className: "legend" },
      h("span", {}, h("i", { className: "dot front" }), "on the Pareto front"), h("span", {}, h("i", { className: "dot" }), "not on the front"),
      h("span", {}, h("i", { className: "dot ring" }), "chosen"), (this.overKey = h("span", {}, h("i", { className: "dot over" }), "over the limit")));
    this.more = h("details", { className: "plain" });
    this.blank = h("p", { className: "blank" });
    this.box = h("div", { className: "chart-box" }, this.picture, this.blank, this.card);
    this.legend.hidden = this.more.hidden = true;
    root.append(this.message, this.box, this.legend, this.more);
    new ResizeObserver(() => this.draw()).observe(this.box);
  }

  show(answer, limit) {
    this.answer = answer;
    this.limit = limit;
    this.overKey.hidden = limit === null;
    this.setMessage("", "");
    this.showTable();
    this.draw();
  }

  /** A request is running. */
  wait() {
    this.root.setAttribute("aria-busy", "true");
    this.blank.textContent = this.answer ? "" : "Simulating all schedules";
  }

  /** Show a message in place of the chart. */
  fail(message) {
    this.setMessage(message, "");
  }

  /** A field has an error, shown beside it: dim the last chart. */
  showStale(message) {
    this.setMessage("", this.answer ? "" : `Not drawn: ${message}`);
    this.root.classList.add("stale");
  }

  setMessage(message, blank) {
    this.root.setAttribute("aria-busy", "false");
    this.root.classList.remove("stale");
    this.message.textContent = message;
    this.message.hidden = !message;
    this.box.hidden = Boolean(message);
    this.legend.hidden = this.more.hidden = Boolean(message) || !this.answer;
    this.blank.textContent = blank;
  }

  /** Mark the schedules with these names; `extra` are points of variants and files. */
  mark(chosen, extra) {
    this.chosen = chosen;
    this.extra = extra;
    this.draw();
  }

  get points() {
    return [...this.answer.points, ...this.extra];
  }

  draw() {
    const width = this.box.clientWidth;
    if (!this.answer || !width) return;
    const focused = this.picture.contains(document.activeElement) ? document.activeElement.dataset.name : null;
    const scale = this.scales(width);
    this.picture.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const placed = separate(this.points.map((point) => ({ point, x: scale.x(point.peak_memory), y: scale.y(point.idle_fraction) })));
    const steps = this.steps(scale, width);
    const front = svg("path", { d: steps.map(([x, y], n) => `${n ? "L" : "M"}${x} ${y}`).join(""), class: "front", "aria-hidden": "true" });
    const leaders = placed.filter(({ x, exact }) => x > exact).map(({ x, y, exact }) => svg("path", { d: `M${exact} ${y - 3}v6m0 -3H${x}`, class: "leader", "aria-hidden": "true" }));
    this.picture.replaceChildren(this.axes(scale, width), front, ...leaders, ...this.labels(placed, steps, scale, width), ...placed.map((point) => this.dot(point)));
    if (focused) this.picture.querySelector(`[data-name="${CSS.escape(focused)}"]`)?.focus();
  }

  scales(width) {
    const top = Math.max(0.02, ...this.points.map((p) => p.idle_fraction)) * 1.1;
    const rows = ruler(0, top, 6, "").ticks.map(({ at }) => ({ at, label: `${+(100 * at).toFixed(1)}%` }));
    const left = Math.max(MIN_LEFT, 10 + LABEL_SIZE * Math.max(...rows.map(({ label }) => label.length)));
    const across = memoryScale([...this.points.map((p) => p.peak_memory), ...(this.limit === null ? [] : [this.limit])]);
    return {
      left, rows, ticks: across.ticks(Math.max(2, Math.min(7, width / 80))), isLog: across.isLog,
      x: (memory) => left + across.share(memory) * (width - left - MARGIN.right),
      y: (idle) => HEIGHT - MARGIN.bottom - (Math.max(0, idle) / top) * (HEIGHT - MARGIN.top - MARGIN.bottom),
    };
  }

  axes(scale, width) {
    const group = svg("g", { class: "axes", "aria-hidden": "true" });
    const floor = HEIGHT - MARGIN.bottom;
    const unit = this.answer.memory_unit;
    for (const { at, label } of scale.rows) {
      group.append(svg("line", { x1: scale.left, x2: width - MARGIN.right, y1: scale.y(at), y2: scale.y(at) }));
      group.append(svg("text", { x: scale.left - 8, y: scale.y(at) + 4, "text-anchor": "end" }, label));
    }
    for (const at of scale.ticks) {
      if (at === 0) continue; // the corner has its 0% already
      group.append(svg("line", { x1: scale.x(at), x2: scale.x(at), y1: floor, y2: floor + 4 }));
      group.append(svg("text", { x: scale.x(at), y: floor + 18, "text-anchor": "middle" }, sizeText(at, unit)));
    }
    group.append(svg("text", { x: width - MARGIN.right, y: HEIGHT - 3, "text-anchor": "end", class: "name" }, `peak memory of a rank${scale.isLog ? ", log scale" : ""} →`));
    group.append(svg("text", { x: 0, y: 11, class: "name" }, "↑ idle"));
    if (this.limit !== null) {
      const x = scale.x(this.limit);
      group.append(svg("rect", { x, y: MARGIN.top, width: Math.max(0, width - MARGIN.right - x), height: floor - MARGIN.top, class: "beyond" }));
      group.append(svg("line", { x1: x, x2: x, y1: MARGIN.top - 8, y2: floor, class: "limit" }));
      const near = x > width - 70;
      group.append(svg("text", { x: near ? x - 5 : x + 5, y: MARGIN.top - 1, "text-anchor": near ? "end" : "start", class: "limit" }, "limit"));
    }
    return group;
  }

  /** The corners of the Pareto front. */
  steps(scale, width) {
    const best = this.answer.points.filter((p) => p.pareto).sort((a, b) => a.peak_memory - b.peak_memory || b.idle_fraction - a.idle_fraction);
    const corners = [];
    for (const { peak_memory: memory, idle_fraction: idle } of best) {
      const [x, y] = [scale.x(memory), scale.y(idle)];
      corners.push([x, corners.length ? corners.at(-1)[1] : MARGIN.top], [x, y]);
    }
    if (corners.length) corners.push([width - MARGIN.right, corners.at(-1)[1]]);
    return corners;
  }

  labels(placed, steps, scale, width) {
    const weight = ({ point }) => 2 * Number(this.isChosen(point)) + Number(point.pareto ?? 0);
    const points = [...placed].sort((a, b) => weight(b) - weight(a)).map(({ point, x, y }) => ({ x, y, radius: RADIUS + (this.isChosen(point) ? 5 : 2), name: point.name, strong: Boolean(point.pareto) }));
    const area = { left: scale.left + 2, right: width, top: 16, bottom: HEIGHT - MARGIN.bottom + 3 };
    const lines = steps.slice(1).map((corner, n) => [...steps[n], ...corner]);
    const taken = [];
    if (this.limit !== null) {
      const x = scale.x(this.limit);
      lines.push([x, MARGIN.top, x, HEIGHT - MARGIN.bottom]);
      taken.push({ left: x - 40, right: x + 40, top: 14, bottom: MARGIN.top + 2 });
    }
    return placeLabels(points, area, taken, lines);
  }

  isChosen(point) {
    return this.chosen.includes(point.name) || Boolean(point.extra);
  }

  dot({ point, x, y }) {
    const chosen = this.isChosen(point);
    const kind = ["dot", point.pareto && "front", chosen && "chosen", point.over_limit && "over", point.extra && "extra"].filter(Boolean).join(" ");
    const node = svg("g", { class: kind, transform: `translate(${x} ${y})`, "data-name": point.name, tabindex: 0, "aria-label": this.describe(point) });
    node.setAttribute("role", point.extra ? "img" : "button");
    if (!point.extra) node.setAttribute("aria-pressed", String(chosen));
    if (chosen) node.append(svg("circle", { r: RADIUS + 4, class: "ring" }));
    node.append(svg("circle", { r: 12, class: "reach" }), svg("circle", { r: RADIUS }));
    const hide = () => (this.card.hidden = true);
    node.addEventListener("pointerenter", () => this.showTip(point, x, y));
    node.addEventListener("pointerleave", hide);
    node.addEventListener("focus", () => this.showTip(point, x, y));
    node.addEventListener("blur", hide);
    if (point.extra) return node;
    node.addEventListener("click", () => this.toggle(point.name));
    node.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      this.toggle(point.name);
    });
    return node;
  }

  describe(point) {
    const front = point.extra ? "" : point.pareto ? ", on the Pareto front" : "";
    return `${point.name}: idle ${percentText(point.idle_fraction)}, peak memory ${sizeText(point.peak_memory, this.answer.memory_unit)}${front}`;
  }

  showTip(point, x, y) {
    const { unit, memory_unit: memoryUnit } = this.answer;
    const rows = [["idle", percentText(point.idle_fraction)], ["bubble rate", percentText(point.bubble)], ["peak memory", sizeText(point.peak_memory, memoryUnit)], ["makespan", timeText(point.makespan, unit)], ["stages / rank", point.stages_per_rank]];
    const hint = point.extra ? "" : this.chosen.includes(point.name) ? "click to remove" : "click to add";
    this.card.replaceChildren(h("b", {}, point.name), h("dl", {}, ...rows.flatMap(([name, text]) => [h("dt", {}, name), h("dd", {}, String(text))])), h("small", {}, hint));
    this.card.hidden = false;
    const { offsetWidth: w, offsetHeight: tall } = this.card;
    this.card.style.left = `${x + 14 + w > this.box.clientWidth ? Math.max(0, x - w - 14) : x + 14}px`;
    this.card.style.top = `${Math.max(0, Math.min(y - 20, HEIGHT - tall))}px`;
  }

  /** The chart as a table, for screen readers, with the errors of schedules that are not in it. */
  showTable() {
    const { points, errors, unit, memory_unit: memoryUnit } = this.answer;
    const sorted = [...points].sort((a, b) => a.idle_fraction - b.idle_fraction || a.peak_memory - b.peak_memory);
    const row = (p) => h("tr", {}, h("th", { scope: "row" }, p.name), h("td", {}, percentText(p.idle_fraction)), h("td", {}, percentText(p.bubble)), h("td", {}, sizeText(p.peak_memory, memoryUnit)), h("td", {}, timeText(p.makespan, unit)), h("td", {}, p.pareto ? "front" : ""));
    const heads = ["", "idle", "bubble rate", "peak memory", "makespan", ""].map((text) => h("th", { scope: "col" }, text));
    const missing = errors.map(({ field, message }) => h("li", {}, message.includes(field) ? message : `${field}: ${message}`));
    this.more.replaceChildren(
      h("summary", {}, errors.length ? `As a table; ${errors.length} missing` : "As a table"),
      h("table", {}, h("thead", {}, h("tr", {}, ...heads)), h("tbody", {}, ...sorted.map(row))),
      ...(missing.length ? [h("ul", {}, ...missing)] : []));
  }
}

/** Move points side by side that would cover each other; `exact` is where a point belongs. */
function separate(points) {
  const done = [];
  for (const point of points) point.exact = point.x;
  for (const point of [...points].sort((a, b) => a.x - b.x || a.y - b.y)) {
    while (done.some((other) => Math.abs(other.x - point.x) < 2 * RADIUS + 1 && Math.abs(other.y - point.y) < RADIUS)) point.x += 2 * RADIUS + 2;
    done.push(point);
  }
  return done;
}

/** The scale from left (0) to right (1): logarithmic if sizes differ much, else most would be at the left. */
function memoryScale(sizes) {
  const [min, max] = [Math.min(...sizes), Math.max(...sizes)];
  if (min > 0 && max > MIN_LOG_RATIO * min) {
    const [from, to] = [Math.log(min) - 0.12 * Math.log(max / min), Math.log(max) + 0.1 * Math.log(max / min)];
    return { isLog: true, share: (size) => (Math.log(size) - from) / (to - from), ticks: (count) => powers(Math.exp(from), Math.exp(to), count) };
  }
  const pad = 0.12 * (max - min);
  const from = pad && min > 0.4 * max ? Math.max(0, min - pad) : 0; // zero, unless that leaves much of the chart empty
  const to = max + (from ? pad : (pad ? 0.08 : 0.8) * max) || 1;
  return { isLog: false, share: (size) => (size - from) / (to - from), ticks: (count) => ruler(from, to, count, "").ticks.map(({ at }) => at) };
}

/** Powers of two (or of four, eight, ...) between two sizes, `count` at max. */
function powers(from, to, count) {
  const [first, last] = [Math.ceil(Math.log2(from)), Math.floor(Math.log2(to))];
  const step = Math.max(1, Math.ceil((last - first + 1) / count));
  const ticks = [];
  for (let power = first; power <= last; power += step) ticks.push(2 ** power);
  return ticks;
}
