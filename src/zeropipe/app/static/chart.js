// Bubble against peak memory, all schedules at this size. A point that no other beats in both is on the front.

import { percentText, ruler, sizeText, timeText } from "/viewer/units.js";
import { h, svg } from "./dom.js";

const HEIGHT = 300;
const MARGIN = { top: 14, right: 18, bottom: 38, left: 46 };
const RADIUS = 5;

export class Chart {
  constructor(root, toggle) {
    this.root = root;
    this.toggle = toggle;
    this.chosen = [];
    this.extra = [];
    this.picture = svg("svg", { class: "chart", height: HEIGHT, role: "group", "aria-label": "Bubble against peak memory" });
    this.card = h("div", { className: "tip", hidden: true });
    this.message = h("p", { className: "error", role: "alert", hidden: true });
    this.legend = h("p", { className: "legend" },
      h("span", {}, h("i", { className: "dot front" }), "on the Pareto front"), h("span", {}, h("i", { className: "dot" }), "beaten by another"),
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
    this.say("", "");
    this.table();
    this.draw();
  }

  /** A question is on its way. */
  wait() {
    this.root.setAttribute("aria-busy", "true");
    this.blank.textContent = this.answer ? "" : "Simulating all schedules";
  }

  /** Too large to be drawn, which is told in its place. */
  fail(message) {
    this.say(message, "");
  }

  /** An input is wrong, which is told beside it: the last picture stays, dimmed. */
  refuse(message) {
    this.say("", this.answer ? "" : `Not drawn: ${message}`);
    this.root.classList.add("stale");
  }

  say(message, blank) {
    this.root.setAttribute("aria-busy", "false");
    this.root.classList.remove("stale");
    this.message.textContent = message;
    this.message.hidden = !message;
    this.box.hidden = Boolean(message);
    this.legend.hidden = this.more.hidden = Boolean(message) || !this.answer;
    this.blank.textContent = blank;
  }

  /** Names of the chosen schedules, and results that are not in the registry at this size. */
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
    const { points } = this;
    this.picture.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const placed = spread(points.map((point) => ({ point, x: scale.x(point.peak_memory), y: scale.y(point.bubble) })));
    this.picture.replaceChildren(this.axes(scale, width), this.front(scale, width), ...labels(placed, width), ...placed.map((one) => this.dot(one)));
    if (focused) this.picture.querySelector(`[data-name="${CSS.escape(focused)}"]`)?.focus();
  }

  scales(width) {
    const top = Math.max(0.02, ...this.points.map((p) => p.bubble)) * 1.12;
    const right = Math.max(...this.points.map((p) => p.peak_memory), this.limit ?? 0, 0) * 1.1 || 1;
    return {
      top, right,
      x: (memory) => MARGIN.left + (memory / right) * (width - MARGIN.left - MARGIN.right),
      y: (bubble) => HEIGHT - MARGIN.bottom - (Math.max(0, bubble) / top) * (HEIGHT - MARGIN.top - MARGIN.bottom),
    };
  }

  axes(scale, width) {
    const group = svg("g", { class: "axes", "aria-hidden": "true" });
    const floor = HEIGHT - MARGIN.bottom;
    const unit = this.answer.memory_unit;
    for (const { at } of ruler(0, scale.top, 6, "").ticks) {
      group.append(svg("line", { x1: MARGIN.left, x2: width - MARGIN.right, y1: scale.y(at), y2: scale.y(at) }));
      group.append(svg("text", { x: MARGIN.left - 8, y: scale.y(at) + 4, "text-anchor": "end" }, `${+(100 * at).toFixed(1)}%`));
    }
    for (const { at } of ruler(0, scale.right, Math.max(2, Math.min(7, width / 80)), "").ticks) {
      group.append(svg("text", { x: scale.x(at), y: floor + 19, "text-anchor": "middle" }, sizeText(at, unit)));
    }
    group.append(svg("text", { x: width - MARGIN.right, y: HEIGHT - 4, "text-anchor": "end", class: "name" }, "peak memory →"));
    group.append(svg("text", { x: 2, y: HEIGHT - 4, class: "name" }, "↑ bubble"));
    if (this.limit) {
      const x = scale.x(this.limit);
      group.append(svg("line", { x1: x, x2: x, y1: MARGIN.top, y2: floor, class: "limit" }));
      group.append(svg("text", { x: x - 5, y: MARGIN.top + 8, "text-anchor": "end", class: "limit" }, "limit"));
    }
    return group;
  }

  /** The steps below which no schedule lies. */
  front(scale, width) {
    const best = this.answer.points.filter((p) => p.pareto).sort((a, b) => a.peak_memory - b.peak_memory || b.bubble - a.bubble);
    if (!best.length) return svg("g");
    let path = `M${scale.x(best[0].peak_memory)} ${MARGIN.top}V${scale.y(best[0].bubble)}`;
    for (const p of best.slice(1)) path += `H${scale.x(p.peak_memory)}V${scale.y(p.bubble)}`;
    return svg("path", { d: `${path}H${width - MARGIN.right}`, class: "front", "aria-hidden": "true" });
  }

  dot({ point, x, y }) {
    const chosen = this.chosen.includes(point.name) || point.extra;
    const kind = ["dot", point.pareto && "front", chosen && "chosen", point.over_limit && "over", point.extra && "extra"].filter(Boolean).join(" ");
    const node = svg("g", { class: kind, transform: `translate(${x} ${y})`, "data-name": point.name, tabindex: 0, "aria-label": this.words(point) });
    node.setAttribute("role", point.extra ? "img" : "button");
    if (!point.extra) node.setAttribute("aria-pressed", String(chosen));
    if (chosen) node.append(svg("circle", { r: RADIUS + 4, class: "ring" }));
    node.append(svg("circle", { r: 12, class: "reach" }), svg("circle", { r: RADIUS }));
    const leave = () => (this.card.hidden = true);
    node.addEventListener("pointerenter", () => this.tip(point, x, y));
    node.addEventListener("pointerleave", leave);
    node.addEventListener("focus", () => this.tip(point, x, y));
    node.addEventListener("blur", leave);
    if (point.extra) return node;
    node.addEventListener("click", () => this.toggle(point.name));
    node.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      this.toggle(point.name);
    });
    return node;
  }

  words(point) {
    const place = point.extra ? "" : point.pareto ? ", on the Pareto front" : "";
    return `${point.name}: bubble ${percentText(point.bubble)}, peak memory ${sizeText(point.peak_memory, this.answer.memory_unit)}${place}`;
  }

  tip(point, x, y) {
    const { unit, memory_unit: memoryUnit } = this.answer;
    const rows = [["bubble", percentText(point.bubble)], ["peak memory", sizeText(point.peak_memory, memoryUnit)], ["makespan", timeText(point.makespan, unit)], ["stages / rank", point.stages_per_rank]];
    const hint = point.extra ? "" : this.chosen.includes(point.name) ? "click to remove" : "click to add";
    this.card.replaceChildren(h("b", {}, point.name), h("dl", {}, ...rows.flatMap(([name, text]) => [h("dt", {}, name), h("dd", {}, String(text))])), h("small", {}, hint));
    this.card.hidden = false;
    const { offsetWidth: w, offsetHeight: tall } = this.card;
    this.card.style.left = `${x + 14 + w > this.box.clientWidth ? Math.max(0, x - w - 14) : x + 14}px`;
    this.card.style.top = `${Math.max(0, Math.min(y - 20, HEIGHT - tall))}px`;
  }

  /** The same in words, for those who do not see the picture, and why some schedules are not in it. */
  table() {
    const { points, errors, unit, memory_unit: memoryUnit } = this.answer;
    const sorted = [...points].sort((a, b) => a.bubble - b.bubble || a.peak_memory - b.peak_memory);
    const row = (p) => h("tr", {}, h("th", { scope: "row" }, p.name), h("td", {}, percentText(p.bubble)), h("td", {}, sizeText(p.peak_memory, memoryUnit)), h("td", {}, timeText(p.makespan, unit)), h("td", {}, p.pareto ? "front" : ""));
    const heads = ["", "bubble", "peak memory", "makespan", ""].map((text) => h("th", { scope: "col" }, text));
    const left = errors.map(({ field, message }) => h("li", {}, message.includes(field) ? message : `${field}: ${message}`));
    this.more.replaceChildren(
      h("summary", {}, errors.length ? `As a table; ${errors.length} left out` : "As a table"),
      h("table", {}, h("thead", {}, h("tr", {}, ...heads)), h("tbody", {}, ...sorted.map(row))),
      ...(left.length ? [h("ul", {}, ...left)] : []));
  }
}

/** Points that lie on each other go side by side. */
function spread(points) {
  const done = [];
  for (const one of [...points].sort((a, b) => a.x - b.x || a.y - b.y)) {
    while (done.some((other) => Math.abs(other.x - one.x) < 2 * RADIUS + 1 && Math.abs(other.y - one.y) < RADIUS)) one.x += 2 * RADIUS + 2;
    done.push(one);
  }
  return done;
}

/** Names where there is room: right, left, above, below; the front first. */
function labels(points, width) {
  const taken = points.map(({ x, y }) => ({ left: x - 8, right: x + 8, top: y - 8, bottom: y + 8 }));
  const made = [];
  for (const { point, x, y } of [...points].sort((a, b) => Number(b.point.pareto ?? 0) - Number(a.point.pareto ?? 0))) {
    const long = point.name.length * 6.4 + 2;
    const places = [[x + 13, y + 4, "start"], [x - 13, y + 4, "end"], [x, y - 13, "middle"], [x, y + 20, "middle"], [x + 9, y - 10, "start"], [x + 9, y + 17, "start"], [x - 9, y - 10, "end"], [x - 9, y + 17, "end"]];
    for (const [at, base, anchor] of places) {
      const left = anchor === "start" ? at : anchor === "end" ? at - long : at - long / 2;
      const box = { left, right: left + long, top: base - 9, bottom: base + 3 };
      const free = !taken.some((other) => box.left < other.right && box.right > other.left && box.top < other.bottom && box.bottom > other.top);
      if (!free || box.left < MARGIN.left || box.right > width || box.top < 0 || box.bottom > HEIGHT - MARGIN.bottom + 2) continue;
      taken.push(box);
      made.push(svg("text", { x: at, y: base, "text-anchor": anchor, class: point.pareto ? "label front" : "label", "aria-hidden": "true" }, point.name));
      break;
    }
  }
  return made;
}
