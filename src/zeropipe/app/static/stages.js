// The dialog of costs per stage: a table to type and paste into.

import { numberText } from "/viewer/units.js";
import { closeButton, closeOnOutsideClick, h, showMessage } from "./dom.js";
import { COSTS, PER_STAGE, parseValue } from "./state.js";

const NAMES = { f: "F", i: "I", w: "W", b: "B", overlap: "overlap", message: "message", activation: "activation", stash: "stash", f_workspace: "F workspace", workspace: "workspace", i_workspace: "I workspace", weights: "weights" };
const HINTS = { b: "I + W", overlap: "F + B", stash: "all" };
const MAX_STAGES_PER_RANK = 8;

export class StagesDialog {
  constructor(dialog, state, onChange) {
    this.dialog = dialog;
    this.state = state;
    this.onChange = onChange;
    this.previous = {}; // single numbers that lists have replaced, by field
    this.error = h("p", { className: "error", role: "alert", hidden: true });
    closeOnOutsideClick(dialog);
  }

  /** Show `stagesPerRank` stages per rank, or as many as the lists have. */
  open(stagesPerRank) {
    const lists = PER_STAGE.map((name) => parseValue(this.state.costs[name])).filter(Array.isArray);
    this.ranks = Math.max(1, Number.parseInt(this.state.ranks, 10) || 1);
    this.numStages = lists.length ? lists[0].length : this.ranks * stagesPerRank;
    this.previous = {};
    showMessage(this.error, "");
    this.draw();
    this.dialog.showModal();
  }

  draw() {
    const counts = [...new Set([this.numStages, ...Array.from({ length: MAX_STAGES_PER_RANK }, (_, n) => this.ranks * (n + 1))])].sort((a, b) => a - b);
    const select = h("select", { id: "num-stages" }, ...counts.map((n) => h("option", { value: n }, String(n))));
    select.value = String(this.numStages);
    select.addEventListener("change", () => this.resize(Number(select.value)));
    this.cells = new Map(PER_STAGE.map((name) => [name, []]));
    const heads = PER_STAGE.map((name) => h("th", { scope: "col" }, h("span", {}, NAMES[name]), this.createSingleButton(name)));
    const rows = Array.from({ length: this.numStages }, (_, n) => h("tr", {}, h("th", { scope: "row" }, String(n)), ...PER_STAGE.map((name) => h("td", {}, this.cell(name, n)))));
    this.dialog.replaceChildren(
      h("header", {}, h("h2", { id: "stages-title" }, "Costs per stage"), closeButton(this.dialog)),
      h("p", { className: "about" }, "The model cut into ", select, this.isDivided()
        ? " stages. A schedule with fewer stages adds up neighbours, so every schedule does the same work. Empty columns divide the form's number."
        : " stages, for schedules with this number of stages. Empty columns have the form's number.", " You can paste a block of cells from a spreadsheet."),
      h("div", { className: "grid" }, h("table", {}, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "stage"), ...heads)), h("tbody", {}, ...rows))), this.error);
  }

  /** Whether a column's single number is divided among the stages, rather than the number of each stage. */
  isDivided(name = "f") {
    return !["message", "f_workspace", "workspace", "i_workspace"].includes(name) && this.state.per !== "stage";
  }

  list(name) {
    const value = parseValue(this.state.costs[name]);
    return Array.isArray(value) ? value : null;
  }

  /** The cost of one stage while the column has a single number. */
  stageCost(name) {
    const value = parseValue(this.state.costs[name]);
    if (typeof value !== "number" || this.state.costs[name] === "") return null;
    return this.isDivided(name) ? (value * this.ranks) / this.numStages : value;
  }

  cell(name, n) {
    const list = this.list(name);
    const single = this.stageCost(name);
    const input = h("input", {
      type: "text", inputMode: "decimal", value: list ? String(list[n] ?? "") : "", placeholder: single === null ? HINTS[name] ?? "" : numberText(single),
      "aria-label": `${NAMES[name]} of stage ${n}`,
    });
    input.addEventListener("input", () => this.write(name));
    input.addEventListener("paste", (event) => this.paste(event, name, n));
    input.addEventListener("keydown", (event) => {
      const step = { ArrowDown: 1, ArrowUp: -1, Enter: 1 }[event.key];
      if (!step) return;
      event.preventDefault();
      this.cells.get(name)[n + step]?.focus();
    });
    this.cells.get(name).push(input);
    return input;
  }

  /** Write a column's cells to the state as a list. Empty cells have the previous single number; if all are empty, it is restored. */
  write(name) {
    const inputs = this.cells.get(name);
    const cells = inputs.map((input) => input.value.trim());
    if (!this.list(name)) this.previous[name] ??= { text: this.state.costs[name], single: this.stageCost(name) };
    const { text = COSTS[name], single = null } = this.previous[name] ?? {};
    const isEmpty = cells.every((cell) => cell === "");
    if (isEmpty) {
      this.state.costs[name] = text;
      delete this.previous[name];
    } else this.state.costs[name] = cells.map((cell) => (cell === "" && single !== null ? String(single) : cell)).join(",");
    inputs.forEach((input, n) => input.toggleAttribute("data-wrong", !isEmpty && !(Number(cells[n] === "" ? single ?? NaN : cells[n]) >= 0)));
    this.onChange();
  }

  /** Show the server's errors that concern this table. */
  showErrors(errors) {
    if (!this.dialog.open) return;
    const own = errors.filter(({ field }) => PER_STAGE.some((name) => field === `costs.${name}`) || field.startsWith("schedules."));
    showMessage(this.error, own.map(({ message }) => message).join("\n"));
  }

  paste(event, name, n) {
    const rows = event.clipboardData.getData("text").trim().split(/\r?\n/).map((line) => line.split(/\t|;|,\s*/));
    if (rows.length === 1 && rows[0].length === 1) return;
    event.preventDefault();
    const first = PER_STAGE.indexOf(name);
    const changed = new Set();
    rows.forEach((row, down) => row.forEach((text, right) => {
      const column = PER_STAGE[first + right];
      const input = column && this.cells.get(column)[n + down];
      if (!input) return;
      input.value = text.trim();
      changed.add(column);
    }));
    for (const column of changed) this.write(column);
  }

  /** The button that replaces a column's list by one number. */
  createSingleButton(name) {
    const node = h("button", { type: "button", className: "quiet", title: "One number for all stages", "aria-label": `${NAMES[name]}: one number for all stages` }, "×");
    node.addEventListener("click", () => {
      const list = this.list(name);
      if (!list) return;
      const sum = list.reduce((a, b) => a + b, 0);
      this.state.costs[name] = String(this.isDivided(name) ? sum / this.ranks : sum / list.length);
      this.onChange();
      this.draw();
    });
    return node;
  }

  /** Change the number of stages: lists are divided or added up. */
  resize(numStages) {
    const before = this.numStages;
    this.numStages = numStages;
    this.previous = {};
    for (const name of PER_STAGE) {
      const list = this.list(name);
      if (!list) continue;
      // the cost between two cuts, as if it were uniform inside each old stage
      const stageCost = (n) => {
        let sum = 0;
        const [from, to] = [(n * before) / numStages, ((n + 1) * before) / numStages];
        for (let stage = Math.floor(from); stage < to && stage < list.length; stage++) sum += list[stage] * (Math.min(to, stage + 1) - Math.max(from, stage));
        return this.isDivided(name) ? sum : sum / (to - from);
      };
      this.state.costs[name] = Array.from({ length: numStages }, (_, n) => Number(stageCost(n).toPrecision(12))).join(",");
    }
    this.onChange();
    this.draw();
  }
}
