// What a file of layer costs says already: shown in the form, and not asked. Another model brings the fields back.

import { $, h } from "./dom.js";

const FIELDS = ["gpu", "sequence", "compile"]; // by name, of the server's request too
const words = (value) => (typeof value === "string" ? value.slice(0, 60) : "");
const number = (value) => (Number.isFinite(value) && value > 0 ? value : null);

/** The facts of a text that holds costs; null for any other. The server says what is wrong with it. */
export function costsIn(text) {
  try {
    const data = JSON.parse(text);
    if (data.type !== "layer costs") return null;
    const machine = data.machine ?? {}, compiled = new Set(data.settings.map((setting) => setting.compile === true));
    const how = `${data.source === "profile" ? "measured" : "estimated"} costs of ${words(data.model)}`;
    const some = data.settings.length > 1 ? [`${data.settings.length} settings`] : [];
    return { facts: [how, `${data.layers.length} layers`, ...some], gpu: words(machine.gpu) || words(machine.cpu) || "not named",
      memory: number(machine.memory), sequence: number(data.sequence), compile: compiled.size > 1 ? null : compiled.has(true) };
  } catch {
    return null;
  }
}

/** Beside a field's label, while a file says its value. */
export const saidMark = (name) => (FIELDS.includes(name) ? h("span", { className: "said", id: `said-${name}`, hidden: true }, "from the file") : null);

/** Whether the form asks for a field. */
export const isAsked = (name) => !$(`in-${name}`).disabled;

export class Said {
  constructor() {
    this.before = null; // what the form said
  }

  /** Show what costs say, or with null what was there before. */
  show(costs) {
    const [gpu, sequence, compile] = FIELDS.map((name) => $(`in-${name}`));
    gpu.querySelector(".said")?.remove();
    this.before ??= { gpu: gpu.value, sequence: sequence.value, compile: compile.checked };
    if (costs) gpu.append(h("option", { className: "said", value: "" }, costs.gpu));
    gpu.value = costs ? "" : this.before.gpu;
    sequence.value = costs ? String(costs.sequence ?? "") : this.before.sequence;
    sequence.placeholder = costs ? "not said" : "";
    compile.checked = costs ? costs.compile === true : this.before.compile;
    compile.indeterminate = costs !== null && costs.compile === null;
    for (const name of FIELDS) {
      $(`in-${name}`).disabled = costs !== null;
      $(`said-${name}`).hidden = costs === null;
    }
    if (!costs) this.before = null;
  }
}
