// Costs per piece of the model, as a table to type and paste into.

import { numberText } from "/viewer/units.js";
import { h, tell } from "./dom.js";
import { COSTS, PER_STAGE, value } from "./state.js";

const NAMES = { f: "F", i: "I", w: "W", b: "B", overlap: "overlap", message: "message", activation: "activation", stash: "stash", weights: "weights" };
const HINTS = { b: "I + W", overlap: "F + B", stash: "all" };
const MOST = 8; // pieces per rank

export class Stages {
  constructor(dialog, state, changed) {
    this.dialog = dialog;
    this.state = state;
    this.changed = changed;
    this.before = {};
    this.error = h("p", { className: "error", role: "alert", hidden: true });
    dialog.addEventListener("click", (event) => {
      if (event.target === dialog) dialog.close(); // beside the sheet
    });
  }

  /** `perRank` pieces per rank, unless lists are there already. */
  open(perRank) {
    const lists = PER_STAGE.map((name) => value(this.state.costs[name])).filter(Array.isArray);
    this.ranks = Math.max(1, Number.parseInt(this.state.ranks, 10) || 1);
    this.pieces = lists.length ? lists[0].length : this.ranks * perRank;
    this.before = {};
    tell(this.error, "");
    this.draw();
    this.dialog.showModal();
  }

  draw() {
    const counts = [...new Set([this.pieces, ...Array.from({ length: MOST }, (_, n) => this.ranks * (n + 1))])].sort((a, b) => a - b);
    const select = h("select", { id: "pieces" }, ...counts.map((n) => h("option", { value: n }, String(n))));
    select.value = String(this.pieces);
    select.addEventListener("change", () => this.cut(Number(select.value)));
    const close = h("button", { type: "button", className: "quiet", "aria-label": "Close", onclick: () => this.dialog.close() }, "×");
    this.cells = new Map(PER_STAGE.map((name) => [name, []]));
    const heads = PER_STAGE.map((name) => h("th", { scope: "col" }, h("span", {}, NAMES[name]), this.single(name)));
    const rows = Array.from({ length: this.pieces }, (_, n) => h("tr", {}, h("th", { scope: "row" }, String(n)), ...PER_STAGE.map((name) => h("td", {}, this.cell(name, n)))));
    this.dialog.replaceChildren(
      h("header", {}, h("h2", { id: "stages-title" }, "Costs per stage"), close),
      h("p", { className: "about" }, "The model cut into ", select, this.isShared()
        ? " pieces. A schedule with fewer stages adds up neighbours, so every schedule does the same work. Empty columns share out the form's number."
        : " stages, for schedules with so many. Empty columns have the form's number.", " A block of cells can be pasted from a spreadsheet."),
      h("div", { className: "grid" }, h("table", {}, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "stage"), ...heads)), h("tbody", {}, ...rows))), this.error);
  }

  /** Whether pieces of a column are parts of a whole, or each as large as the next. */
  isShared(name = "f") {
    return name !== "message" && this.state.per !== "stage";
  }

  list(name) {
    const given = value(this.state.costs[name]);
    return Array.isArray(given) ? given : null;
  }

  /** What one piece costs while the column has a single number. */
  share(name) {
    const given = value(this.state.costs[name]);
    if (typeof given !== "number" || this.state.costs[name] === "") return null;
    return this.isShared(name) ? (given * this.ranks) / this.pieces : given;
  }

  cell(name, n) {
    const list = this.list(name);
    const share = this.share(name);
    const input = h("input", {
      type: "text", inputMode: "decimal", value: list ? String(list[n] ?? "") : "", placeholder: share === null ? HINTS[name] ?? "" : numberText(share),
      "aria-label": `${NAMES[name]} of stage ${n}`,
    });
    input.addEventListener("input", () => this.write(name));
    input.addEventListener("paste", (event) => this.paste(event, name, n));
    input.addEventListener("keydown", (event) => {
      const by = { ArrowDown: 1, ArrowUp: -1, Enter: 1 }[event.key];
      if (!by) return;
      event.preventDefault();
      this.cells.get(name)[n + by]?.focus();
    });
    this.cells.get(name).push(input);
    return input;
  }

  /** A column's cells as a list: empty ones keep their share of the number that was there before; all empty, the number. */
  write(name) {
    const inputs = this.cells.get(name);
    const cells = inputs.map((input) => input.value.trim());
    if (!this.list(name)) this.before[name] ??= { text: this.state.costs[name], share: this.share(name) };
    const { text = COSTS[name], share = null } = this.before[name] ?? {};
    if (cells.every((cell) => cell === "")) {
      this.state.costs[name] = text;
      delete this.before[name];
    } else this.state.costs[name] = cells.map((cell) => (cell === "" && share !== null ? String(share) : cell)).join(",");
    const alone = cells.every((cell) => cell === "");
    inputs.forEach((input, n) => input.toggleAttribute("data-wrong", !alone && !(Number(cells[n] === "" ? share ?? NaN : cells[n]) >= 0)));
    this.changed();
  }

  /** What the server says about the costs, as far as it concerns this table. */
  tell(errors) {
    if (!this.dialog.open) return;
    const own = errors.filter(({ field }) => PER_STAGE.some((name) => field === `costs.${name}`) || field.startsWith("schedules."));
    tell(this.error, own.map(({ message }) => message).join("\n"));
  }

  paste(event, name, n) {
    const rows = event.clipboardData.getData("text").trim().split(/\r?\n/).map((line) => line.split(/\t|;|,\s*/));
    if (rows.length === 1 && rows[0].length === 1) return;
    event.preventDefault();
    const first = PER_STAGE.indexOf(name);
    const touched = new Set();
    rows.forEach((row, down) => row.forEach((text, right) => {
      const column = PER_STAGE[first + right];
      const input = column && this.cells.get(column)[n + down];
      if (!input) return;
      input.value = text.trim();
      touched.add(column);
    }));
    for (const column of touched) this.write(column);
  }

  /** Back to one number for all. */
  single(name) {
    const node = h("button", { type: "button", className: "quiet", title: "One number for all stages", "aria-label": `${NAMES[name]}: one number for all stages` }, "×");
    node.addEventListener("click", () => {
      const list = this.list(name);
      if (!list) return;
      const whole = list.reduce((a, b) => a + b, 0);
      this.state.costs[name] = String(this.isShared(name) ? whole / this.ranks : whole / list.length);
      this.changed();
      this.draw();
    });
    return node;
  }

  /** Another number of pieces: lists are shared out or added up. */
  cut(pieces) {
    const old = this.pieces;
    this.pieces = pieces;
    this.before = {};
    for (const name of PER_STAGE) {
      const list = this.list(name);
      if (!list) continue;
      // what lies between the cuts, as if the work were spread evenly inside each old piece
      const part = (n) => {
        let sum = 0;
        const [from, to] = [(n * old) / pieces, ((n + 1) * old) / pieces];
        for (let at = Math.floor(from); at < to && at < list.length; at++) sum += list[at] * (Math.min(to, at + 1) - Math.max(from, at));
        return this.isShared(name) ? sum : sum / (to - from);
      };
      this.state.costs[name] = Array.from({ length: pieces }, (_, n) => Number(part(n).toPrecision(12))).join(",");
    }
    this.changed();
    this.draw();
  }
}
