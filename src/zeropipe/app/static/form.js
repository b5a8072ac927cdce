// Fields: sizes and costs. Each keeps what was typed, and shows what the server says about it below.

import { h, tell } from "./dom.js";
import { COSTS, PER, PER_STAGE } from "./state.js";

const SIZE_FIELDS = {
  ranks: { label: "Ranks" },
  microbatches: { label: "Microbatches" },
  stages_per_rank: { label: "Stages / rank", hint: "auto", about: "For every schedule that can have so many; the others keep their own." },
  weight_parts: { label: "W in parts", hint: "off", about: "Cut every W into so many parts and run them where their rank would wait. 1 moves whole W." },
};

const SHARED = "per-what"; // stands for what `per` says
const PER_WORDS = { rank: ["a rank", "per rank, shared out over its stages"], stage: ["a stage", "per stage"] };

const GROUPS = [
  ["Time", SHARED, [
    ["f", "Forward", { kind: "F" }],
    ["i", "Input gradient", { kind: "I" }],
    ["w", "Weight gradient", { kind: "W" }],
    ["b", "Whole backward", { kind: "B", hint: "I + W" }],
    ["overlap", "F and B as one step", { hint: "F + B" }],
    ["unit", "Unit of time", { choices: [["", "abstract"], ["s", "seconds"]] }],
  ]],
  ["Memory", "of a microbatch; weights once", [
    ["activation", "Activations of a forward", {}],
    ["stash", "Kept from I until W", { hint: "all of it" }],
    ["weights", "Weights, gradients, optimizer", {}],
    ["memory_limit", "Limit of a rank", { hint: "none" }],
    ["memory_unit", "Unit of memory", { choices: [["", "abstract"], ["B", "bytes"]] }],
  ]],
  ["Messages", "between ranks", [
    ["p2p", "Latency", {}],
    ["message", "Size of a message", {}],
    ["bandwidth", "Bandwidth", { hint: "no limit" }],
    ["node_size", "Ranks per machine", { hint: "all" }],
    ["inter_p2p", "Latency between machines", { hint: "the same" }],
    ["inter_bandwidth", "Bandwidth between machines", { hint: "the same" }],
    ["blocking", "A sender waits for its transfer", { box: true }],
    ["blocking_ends", "… in warm-up and cool-down only", { box: true }],
    ["serial_links", "One transfer at a time per link", { box: true }],
  ]],
  ["Sharded stages", "over data-parallel ranks", [
    ["shards", "Weights are gathered", { choices: [["", "never: not sharded"], ["keep", "once per step"], ["regather", "for every microbatch"]] }],
    ["unshard", "Time to gather a part", { hint: "size / bandwidth" }],
    ["reduce", "Time to reduce its gradients", { hint: "size / bandwidth" }],
    ["whole_weights", "Memory of gathered weights", {}],
    ["whole_gradients", "Memory of whole gradients", {}],
    ["shard_bandwidth", "Bandwidth", { hint: "no limit" }],
    ["units", "Pieces of a stage", {}],
  ]],
];

// where the server's name for a field differs from the form's
const ALIAS = { "costs.inter_node": "costs.inter_p2p", "costs.inter_node.p2p": "costs.inter_p2p", "costs.inter_node.bandwidth": "costs.inter_bandwidth", "costs.edges": "costs", "schedules": "page" };

export class Form {
  /** `changed()` is called after each change of `state`. */
  constructor(root, costsRoot, state, changed, actions) {
    this.state = state;
    this.changed = changed;
    this.fields = new Map();
    this.perWords = [];
    for (const [name, facts] of Object.entries(SIZE_FIELDS)) this.addSize(root, name, facts);
    costsRoot.append(this.files(actions), this.per(), ...GROUPS.map((group) => this.group(...group)));
  }

  /** What a cost is of: of a rank's part of the model, or of a stage. */
  per() {
    const error = h("p", { className: "error", id: "error-per", role: "alert", hidden: true });
    const made = PER.map((value) => {
      const input = h("input", { type: "radio", name: "per", id: `in-per-${value}`, value, onchange: () => this.set("per", value) });
      return [input, h("label", { htmlFor: input.id }, PER_WORDS[value][0])];
    });
    const show = () => {
      for (const [input] of made) input.checked = input.value === this.state.per;
      for (const words of this.perWords) words.textContent = perWords(this.state.per);
    };
    this.fields.set("per", { input: made[0][0], error, show });
    return h("fieldset", { className: "segment" }, h("legend", {}, "Costs are those of"), h("div", {}, ...made.flat()), error);
  }

  addSize(root, name, { label, hint, about }) {
    const input = h("input", { id: `in-${name}`, type: "text", inputMode: "numeric", placeholder: hint ?? "", title: about ?? "" });
    const step = (by) => {
      const now = Number(input.value);
      const next = input.value.trim() === "" ? (by > 0 ? 1 : "") : now + by;
      if (Number.isNaN(now) || next === now) return;
      input.value = hint && next < 1 ? "" : String(Math.max(1, next));
      this.set(name, input.value);
    };
    input.addEventListener("keydown", (event) => {
      const by = { ArrowUp: 1, ArrowDown: -1, PageUp: 8, PageDown: -8 }[event.key];
      if (by) {
        event.preventDefault();
        step(by);
      }
    });
    const less = h("button", { type: "button", tabIndex: -1, "aria-label": `fewer ${label.toLowerCase()}`, onclick: () => step(-1) }, "−");
    const more = h("button", { type: "button", tabIndex: -1, "aria-label": `more ${label.toLowerCase()}`, onclick: () => step(1) }, "+");
    const place = root.querySelector(`[data-field="${name}"]`);
    place.append(h("label", { htmlFor: input.id }, label), h("div", { className: "stepper" }, less, input, more));
    this.bind(name, input, place, () => this.state[name], (text) => (this.state[name] = text));
  }

  group(title, about, rows) {
    const words = h("span", {}, about);
    if (about === SHARED) this.perWords.push(words);
    const node = h("fieldset", { className: "costs" }, h("legend", {}, title, words));
    for (const row of rows) node.append(this.cost(...row));
    return node;
  }

  cost(name, label, { kind, hint, choices, box }) {
    const id = `in-${name}`;
    let input;
    if (choices) input = h("select", { id }, ...choices.map(([value, text]) => h("option", { value }, text)));
    else if (box) input = h("input", { id, type: "checkbox" });
    else input = h("input", { id, type: "text", inputMode: PER_STAGE.includes(name) ? "text" : "decimal", placeholder: hint ?? "", spellcheck: false });
    const swatch = kind ? h("i", { className: `swatch kind-${kind}` }) : null;
    const place = h("div", { className: box ? "field line box" : "field line", "data-field": `costs.${name}` });
    const words = h("label", { htmlFor: id }, swatch, label);
    place.append(...(box ? [input, words] : [words, input]));
    this.bind(`costs.${name}`, input, place, () => this.state.costs[name], (text) => (this.state.costs[name] = text));
    return place;
  }

  bind(field, input, place, get, put) {
    const error = h("p", { className: "error", id: `error-${field.replace(".", "-")}`, role: "alert", hidden: true });
    place.append(error);
    const box = input.type === "checkbox";
    const show = () => (box ? (input.checked = get()) : (input.value = get()));
    input.addEventListener(box || input.tagName === "SELECT" ? "change" : "input", () => {
      put(box ? input.checked : input.value);
      this.changed();
    });
    show();
    this.fields.set(field, { input, error, show });
  }

  set(name, text) {
    this.state[name] = text;
    this.changed();
  }

  files({ perStage, paste, copy, reset }) {
    this.costsError = h("p", { className: "error", id: "error-costs", role: "alert", hidden: true });
    this.edges = h("p", { className: "note", hidden: true });
    const button = (text, act) => h("button", { type: "button", onclick: act }, text);
    const row = h("div", { className: "row" }, button("Per stage…", perStage), button("Paste…", paste), button("Copy", copy), button("Reset", reset));
    return h("div", { className: "costs-files" }, row, this.edges, this.costsError);
  }

  /** Show the state after it was changed elsewhere. */
  sync() {
    for (const { input, show } of this.fields.values()) if (input !== document.activeElement || input.type === "radio") show();
    const edges = Object.keys(this.state.edges);
    this.edges.hidden = !edges.length;
    this.edges.textContent = edges.length ? `Own costs for the directions ${edges.join(", ")} (from the costs file).` : "";
  }

  /** How many costs differ from their defaults. */
  get numSet() {
    const costs = Object.entries(this.state.costs).filter(([name, given]) => given !== COSTS[name]);
    return costs.length + Object.keys(this.state.edges).length + Number(this.state.per !== PER[0]);
  }

  /** Put each error beside its field; returns those that belong to no field here. */
  tell(errors) {
    const left = [];
    const told = new Map();
    for (const { field, message } of errors) {
      const name = ALIAS[field] ?? field;
      if (this.fields.has(name) || name === "costs") told.set(name, message);
      else left.push({ field, message });
    }
    for (const [name, { input, error }] of this.fields) tell(error, told.get(name) ?? "", input);
    tell(this.costsError, told.get("costs") ?? "");
    document.getElementById("tab-costs").classList.toggle("wrong", this.wrongCosts);
    return left;
  }

  /** Whether an error lies in the pane of costs, which may be out of sight. */
  get wrongCosts() {
    return !this.costsError.hidden || [...this.fields].some(([name, { error }]) => (name === "per" || name.startsWith("costs.")) && !error.hidden);
  }
}

/** "per rank, shared out over its stages", for people. */
export function perWords(per) {
  return PER_WORDS[per]?.[1] ?? "";
}
