// The fields of sizes and costs. Each keeps the text as typed, and shows the server's error below it.

import { h, showMessage } from "./dom.js";
import { COSTS, PER, PER_STAGE } from "./state.js";

const SIZE_FIELDS = {
  ranks: { label: "Ranks" },
  microbatches: { label: "Microbatches" },
  stages_per_rank: { label: "Stages / rank", hint: "auto", about: "For the schedules that can have this number; the others keep their own." },
  weight_parts: { label: "W in parts", hint: "off", about: "Divide every W into this number of parts, which run where their rank would wait. 1 moves each W as one." },
};

const PER_TEXT = { rank: "per rank, divided among its stages", stage: "per stage" };

const GROUPS = [
  ["Time", PER_TEXT, [
    ["f", "Forward", { kind: "F" }],
    ["i", "Input gradient", { kind: "I" }],
    ["w", "Weight gradient", { kind: "W" }],
    ["b", "Full backward", { kind: "B", hint: "I + W" }],
    ["overlap", "F and B as one step", { hint: "F + B" }],
    ["unit", "Unit of time", { choices: [["", "abstract"], ["s", "seconds"]] }],
  ]],
  ["Memory", "per microbatch; weights once", [
    ["activation", "Activations of a forward", {}],
    ["stash", "Kept from I until W", { hint: "all of it" }],
    ["f_workspace", "While a forward runs", {}],
    ["workspace", "While a full backward runs", {}],
    ["i_workspace", "While an input gradient runs", { hint: "the same" }],
    ["weights", "Weights, gradients, optimizer", {}],
    ["first_gradients", "Part that the first B or W allocates", {}],
    ["memory_limit", "Limit per rank", { hint: "none" }],
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
    ["unshard", "Time to gather a stage", { hint: "size / bandwidth" }],
    ["reduce", "Time to reduce its gradients", { hint: "size / bandwidth" }],
    ["full_weights", "Memory of gathered weights", {}],
    ["gathered_weights", "Memory of weights gathered at a time", {}],
    ["started_weights", "Memory of weights gathered before a stage runs", {}],
    ["full_gradients", "Memory of full gradients", {}],
    ["shard_bandwidth", "Bandwidth", { hint: "no limit" }],
    ["units", "FSDP units of a stage", {}],
  ]],
];

// fields that have another name in the server's answer
const FORM_FIELDS = { "costs.inter_node": "costs.inter_p2p", "costs.inter_node.p2p": "costs.inter_p2p", "costs.inter_node.bandwidth": "costs.inter_bandwidth", "costs.edges": "costs", "schedules": "page" };

export class Form {
  /** `onChange()` is called after each change of `state`. */
  constructor(root, costsRoot, state, onChange, actions) {
    this.state = state;
    this.onChange = onChange;
    this.fields = new Map();
    this.perNodes = []; // show whether costs are per rank or per stage
    for (const [name, settings] of Object.entries(SIZE_FIELDS)) this.addSize(root, name, settings);
    costsRoot.append(this.createButtons(actions), this.createPer(), ...GROUPS.map((group) => this.createGroup(...group)));
  }

  /** Whether costs are per rank or per stage. */
  createPer() {
    const error = h("p", { className: "error", id: "error-per", role: "alert", hidden: true });
    const choices = PER.map((value) => {
      const input = h("input", { type: "radio", name: "per", id: `in-per-${value}`, value, onchange: () => this.set("per", value) });
      return [input, h("label", { htmlFor: input.id }, value)];
    });
    const show = () => {
      for (const [input] of choices) input.checked = input.value === this.state.per;
      for (const node of this.perNodes) node.textContent = perText(this.state.per);
    };
    this.fields.set("per", { input: choices[0][0], error, show });
    return h("fieldset", { className: "segment" }, h("legend", {}, "Costs are per"), h("div", {}, ...choices.flat()), error);
  }

  addSize(root, name, { label, hint, about }) {
    const input = h("input", { id: `in-${name}`, type: "text", inputMode: "numeric", placeholder: hint ?? "", title: about ?? "" });
    const step = (change) => {
      const now = Number(input.value);
      const next = input.value.trim() === "" ? (change > 0 ? 1 : "") : now + change;
      if (Number.isNaN(now) || next === now) return;
      input.value = hint && next < 1 ? "" : String(Math.max(1, next));
      this.set(name, input.value);
    };
    input.addEventListener("keydown", (event) => {
      const change = { ArrowUp: 1, ArrowDown: -1, PageUp: 8, PageDown: -8 }[event.key];
      if (change) {
        event.preventDefault();
        step(change);
      }
    });
    const less = h("button", { type: "button", tabIndex: -1, "aria-label": `fewer ${label.toLowerCase()}`, onclick: () => step(-1) }, "−");
    const more = h("button", { type: "button", tabIndex: -1, "aria-label": `more ${label.toLowerCase()}`, onclick: () => step(1) }, "+");
    const field = root.querySelector(`[data-field="${name}"]`);
    field.append(h("label", { htmlFor: input.id }, label), h("div", { className: "stepper" }, less, input, more));
    this.bind(name, input, field, () => this.state[name], (text) => (this.state[name] = text));
  }

  createGroup(title, about, rows) {
    const note = h("span", {}, about === PER_TEXT ? "" : about);
    if (about === PER_TEXT) this.perNodes.push(note);
    const node = h("fieldset", { className: "costs" }, h("legend", {}, title, note));
    for (const row of rows) node.append(this.createCost(...row));
    return node;
  }

  createCost(name, label, { kind, hint, choices, box }) {
    const id = `in-${name}`;
    let input;
    if (choices) input = h("select", { id }, ...choices.map(([value, text]) => h("option", { value }, text)));
    else if (box) input = h("input", { id, type: "checkbox" });
    else input = h("input", { id, type: "text", inputMode: PER_STAGE.includes(name) ? "text" : "decimal", placeholder: hint ?? "", spellcheck: false });
    const swatch = kind ? h("i", { className: `swatch kind-${kind}` }) : null;
    const field = h("div", { className: box ? "field line box" : "field line", "data-field": `costs.${name}` });
    const text = h("label", { htmlFor: id }, swatch, label);
    field.append(...(box ? [input, text] : [text, input]));
    this.bind(`costs.${name}`, input, field, () => this.state.costs[name], (text) => (this.state.costs[name] = text));
    return field;
  }

  /** Connect an input with the state. */
  bind(name, input, field, get, set) {
    const error = h("p", { className: "error", id: `error-${name.replace(".", "-")}`, role: "alert", hidden: true });
    field.append(error);
    const box = input.type === "checkbox";
    const show = () => (box ? (input.checked = get()) : (input.value = get()));
    input.addEventListener(box || input.tagName === "SELECT" ? "change" : "input", () => {
      set(box ? input.checked : input.value);
      this.onChange();
    });
    show();
    this.fields.set(name, { input, error, show });
  }

  set(name, text) {
    this.state[name] = text;
    this.onChange();
  }

  createButtons({ perStage, paste, copy, reset }) {
    this.costsError = h("p", { className: "error", id: "error-costs", role: "alert", hidden: true });
    this.edges = h("p", { className: "note", hidden: true });
    const button = (text, act) => h("button", { type: "button", onclick: act }, text);
    const row = h("div", { className: "row" }, button("Per stage…", perStage), button("Paste…", paste), button("Copy", copy), button("Reset", reset));
    return h("div", { className: "costs-files" }, row, this.edges, this.costsError);
  }

  /** Show the state after it was changed outside the form. */
  sync() {
    for (const { input, show } of this.fields.values()) if (input !== document.activeElement || input.type === "radio") show();
    const edges = Object.keys(this.state.edges);
    this.edges.hidden = !edges.length;
    this.edges.textContent = edges.length ? `Links with their own costs: ${edges.join(", ")} (from the costs file).` : "";
  }

  /** The number of costs that differ from their defaults. */
  get numChanged() {
    const costs = Object.entries(this.state.costs).filter(([name, given]) => given !== COSTS[name]);
    return costs.length + Object.keys(this.state.edges).length + Number(this.state.per !== PER[0]);
  }

  /** Show each error below its field; returns the errors of other fields. */
  showErrors(errors) {
    const others = [];
    const messages = new Map();
    for (const { field, message } of errors) {
      const name = FORM_FIELDS[field] ?? field;
      if (this.fields.has(name) || name === "costs") messages.set(name, message);
      else others.push({ field, message });
    }
    for (const [name, { input, error }] of this.fields) showMessage(error, messages.get(name) ?? "", input);
    showMessage(this.costsError, messages.get("costs") ?? "");
    document.getElementById("tab-costs").classList.toggle("wrong", this.hasCostErrors);
    return others;
  }

  /** Whether the pane of costs, which may be hidden, has an error. */
  get hasCostErrors() {
    return !this.costsError.hidden || [...this.fields].some(([name, { error }]) => (name === "per" || name.startsWith("costs.")) && !error.hidden);
  }
}

export function perText(per) {
  return PER_TEXT[per] ?? "";
}
