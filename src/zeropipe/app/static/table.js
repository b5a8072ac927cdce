// The table of the comparison: a row per choice with its settings, its figures and a bar of its time.

import { countText, percentText, sizeText, timeText } from "/viewer/units.js";
import { h, showMessage } from "./dom.js";
import { createFormatsMenu } from "./downloads.js";

const PARTS = [["busy", "busy"], ["warm_up", "warm-up"], ["waiting", "waiting for data"], ["communication", "communication"], ["cool_down", "cool-down"], ["other", "other"], ["sharding", "sharding"], ["offload", "offload"]];

const PRESETS = { "The classics": ["gpipe", "1f1b", "interleaved"], "Zero bubble": ["1f1b", "zb-h1", "zbv"], "Less memory": ["1f1b", "v-half", "v-min"] };

export class Table {
  /**
   * `actions`: update(), selectSchedules(names), removeChoice(choice), addVariant(choice), addSimulation(choice), useTimes(choice),
   * download(format, choice), showTimeline(n).
   */
  constructor(root, catalog, actions) {
    this.catalog = catalog;
    this.actions = actions;
    this.rows = new Map();
    this.empty = h("div", { className: "empty" },
      h("p", {}, "Choose schedules from the list, drop a file anywhere, or start with one of these:"),
      h("div", { className: "row" }, ...Object.entries(PRESETS).map(([text, names]) => h("button", { type: "button", onclick: () => actions.selectSchedules(names) }, h("b", {}, text), h("span", {}, names.join(", "))))));
    const heads = ["Schedule", "Makespan", "Idle", "Peak memory", h("span", { className: "unseen" }, "Download and remove")];
    this.table = h("table", { className: "compare" }, h("caption", { className: "unseen" }, "Comparison of the chosen schedules"),
      h("thead", {}, h("tr", {}, ...heads.map((text) => h("th", { scope: "col" }, text)))));
    const keys = PARTS.filter(([name]) => name !== "other").map(([name, text]) => h("span", {}, h("i", { className: `part part-${name}` }), text));
    this.rareKeys = { sharding: keys.at(-2), offload: keys.at(-1) };
    this.box = h("div", { className: "bare" }, this.table, h("p", { className: "legend" }, "Ranks' time: ", ...keys));
    root.append(this.empty, this.box);
  }

  /** Create and remove rows for these choices. Rows that stay keep their nodes, and so the focus. */
  arrange(choices) {
    for (const [choice, row] of this.rows) {
      if (choices.includes(choice)) continue;
      row.node.remove();
      this.rows.delete(choice);
    }
    choices.forEach((choice, n) => {
      if (!this.rows.has(choice)) this.rows.set(choice, new Row(choice, this.catalog.get(choice.name), this.actions));
      const { node } = this.rows.get(choice);
      if (this.table.tBodies[n] !== node) this.table.insertBefore(node, this.table.tBodies[n] ?? null);
    });
    this.empty.hidden = choices.length > 0;
    this.box.hidden = !choices.length;
  }

  /** Show results and errors, both by the index of the choice. */
  show(choices, results, errors) {
    const longest = (unit) => Math.max(...results.filter((result) => result.unit === unit).map((result) => result.makespan));
    this.box.classList.toggle("bare", !results.length);
    for (const [cause, key] of Object.entries(this.rareKeys)) key.style.display = results.some((result) => result.idle[cause] > 0) ? "" : "none";
    const groupSize = (group) => results.filter((result) => result.group === group).length;
    choices.forEach((choice, n) => {
      const row = this.rows.get(choice);
      const error = errors.find(({ field }) => field === `schedules.${n}` || field.startsWith(`schedules.${n}.`));
      const result = results.find((other) => other.choice === n);
      if (error) row.fail(error.message);
      else if (result) row.show(result, results.indexOf(result), { isCompared: results.length > 1, numRivals: groupSize(result.group) - 1, longest: longest(result.unit) });
      else row.fail("");
    });
  }
}

class Row {
  constructor(choice, facts, actions) {
    this.choice = choice;
    this.actions = actions;
    this.name = h("button", { type: "button", className: "name", title: "Go to its timeline" }, choice.name);
    this.note = h("span", { className: "note" });
    this.cells = [0, 1, 2].map(() => h("td", {}));
    this.share = h("div", { className: "share", role: "img" });
    this.error = h("p", { className: "error", role: "alert", hidden: true });
    this.advice = h("p", { className: "advice", hidden: true });
    const remove = h("button", { type: "button", className: "quiet", "aria-label": `Remove ${choice.name}`, title: "Remove", onclick: () => actions.removeChoice(choice) }, "×");
    const menu = createFormatsMenu(`Download ${choice.name}`, "↓", (format) => actions.download(format, choice));
    this.settings = h("div", { className: "settings" }, ...this.createSettings(facts));
    this.name.addEventListener("click", () => actions.showTimeline(this.index));
    this.node = h("tbody", { "data-choice": choice.name },
      h("tr", {}, h("th", { scope: "row" }, this.name, this.note), ...this.cells, h("td", { className: "tools" }, menu, remove)),
      h("tr", { className: "more" }, h("td", { colSpan: 5 }, this.settings, this.error, this.advice, this.share)));
  }

  createSettings(facts) {
    const { choice, actions } = this;
    if (choice.file) {
      this.simulateButton = h("button", { type: "button", className: "link", hidden: true, onclick: () => actions.addSimulation(choice) }, "also simulate it");
      this.timesButton = h("button", { type: "button", className: "link", hidden: true, onclick: () => actions.useTimes(choice) }, "use its times as costs");
      return [this.simulateButton, this.timesButton];
    }
    if (!facts) return [];
    const settings = [];
    if (facts.stages_per_rank.length > 1) {
      const options = [["", "auto"], ...[...facts.stages_per_rank].sort((a, b) => a - b).map((n) => [String(n), String(n)])];
      const select = h("select", {}, ...options.map(([value, text]) => h("option", { value }, text)));
      select.value = choice.stages_per_rank;
      select.addEventListener("change", () => {
        choice.stages_per_rank = select.value;
        actions.update();
      });
      settings.push(h("label", {}, "stages / rank ", select));
    }
    for (const [name, defaultValue] of Object.entries(facts.options)) {
      const input = h("input", { type: "text", inputMode: "numeric", size: 4, placeholder: defaultValue === null ? "auto" : String(defaultValue), value: choice.options[name] ?? "" });
      input.addEventListener("input", () => {
        choice.options[name] = input.value.trim();
        actions.update();
      });
      settings.push(h("label", {}, name.replaceAll("_", " "), " ", input));
    }
    if (settings.length) settings.push(h("button", { type: "button", className: "link", onclick: () => actions.addVariant(choice) }, "add a variant"));
    return settings;
  }

  /** `numRivals` other results do the same work; a bar of the makespan `longest` fills the width. */
  show(result, index, { isCompared, numRivals, longest }) {
    this.index = index;
    showMessage(this.error, "");
    showMessage(this.advice, result.advice.join("\n"));
    this.name.textContent = result.title;
    this.note.textContent = this.notes(result).join(" · ");
    if (this.choice.file) this.simulateButton.hidden = this.timesButton.hidden = !result.recorded;
    const [time, idle, memory] = this.cells;
    time.replaceChildren(figure(timeText(result.makespan, result.unit)), ...timeNote(result, isCompared, numRivals));
    const rate = h("small", { title: "The Zero Bubble paper's rate: idle time within the longest rank's own span" }, `bubble rate ${percentText(result.bubble)}`);
    idle.replaceChildren(figure(percentText(result.idle_fraction)), rate);
    memory.replaceChildren(figure(result.peak_memory === null ? "–" : sizeText(result.peak_memory, result.memory_unit)), ...memoryNote(result, numRivals));
    this.showBar(result, longest);
    this.node.classList.remove("failed");
  }

  notes(result) {
    const notes = [];
    if (this.choice.file && !result.title.startsWith(this.choice.file.replace(/\.[^.]*$/, ""))) notes.push(this.choice.file);
    if (this.choice.file) notes.push(`${countText(result.num_ranks, "rank")}, ${countText(result.num_microbatches, "microbatch")}`);
    if (result.recorded) notes.push(result.measured ? "measured" : "recorded");
    if (result.num_stages !== result.num_ranks) notes.push(`${countText(result.num_stages, "stage")}, ${result.placement}`);
    if (result.num_weight_parts > 1) notes.push(`W in ${result.num_weight_parts} parts${result.filled ? "" : ", as in the file"}`);
    if (result.copies > 1) notes.push("two copies of the weights");
    return notes;
  }

  /** A bar as long as the makespan, divided by what the ranks do. */
  showBar(result, longest) {
    const shares = { busy: result.busy, ...result.idle };
    const all = Object.values(shares).reduce((a, b) => a + b, 0) || 1;
    const parts = PARTS.map(([name, text]) => [name, text, shares[name] / all]).filter(([, , share]) => share > 1e-6);
    const text = `Ranks' time: ${parts.map(([, label, share]) => `${label} ${percentText(share)}`).join(", ")}`;
    this.share.setAttribute("aria-label", text);
    this.share.title = text;
    this.share.style.width = `${longest > 0 ? Math.max(4, (100 * result.makespan) / longest) : 100}%`;
    this.share.replaceChildren(...parts.map(([name, , share]) => h("i", { className: `part part-${name}`, style: `width:${(100 * share).toFixed(3)}%` })));
  }

  fail(message) {
    showMessage(this.error, message);
    this.node.classList.toggle("failed", true);
    for (const cell of this.cells) cell.replaceChildren();
    this.share.replaceChildren();
    showMessage(this.advice, "");
    this.note.textContent = "";
  }
}

function figure(text) {
  return h("b", {}, text);
}

function timeNote(result, isCompared, numRivals) {
  if (!isCompared) return [];
  if (!numRivals) return [h("small", {}, "other work")];
  if (result.best_time) return [h("small", { className: "good" }, "fastest")];
  return [h("small", {}, `× ${result.of_best.toFixed(2)}`)];
}

function memoryNote(result, numRivals) {
  const over = result.over_limit.length;
  if (over) {
    const ranks = over === result.num_ranks ? "all ranks" : over === 1 ? `rank ${result.over_limit[0]}` : `${over} ranks`;
    return [h("small", { className: "bad" }, `over on ${ranks}`)];
  }
  return numRivals && result.best_memory ? [h("small", { className: "good" }, "least")] : [];
}
