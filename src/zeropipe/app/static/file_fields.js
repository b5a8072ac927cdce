// Fields of the Plan form that a file of layer costs sets: they show the file's values and cannot be changed.

import { $, h } from "./dom.js";

const FIELDS = ["gpu", "sequence", "compile"]; // names in the server's request
const asText = (value) => (typeof value === "string" ? value.slice(0, 60) : "");
const asPositive = (value) => (Number.isFinite(value) && value > 0 ? value : null);

/** The facts of a file of layer costs; null for any other text, also for one that the server will refuse. */
export function parseLayerCosts(text) {
  try {
    const data = JSON.parse(text);
    if (data.type !== "layer costs") return null;
    const machine = data.machine ?? {}, compiled = new Set(data.settings.map((setting) => setting.compile === true));
    const kind = `${data.source === "profile" ? "measured" : "estimated"} costs of ${asText(data.model)}`;
    const settings = data.settings.length > 1 ? [`${data.settings.length} settings`] : [];
    return { facts: [kind, `${data.layers.length} layers`, ...settings], gpu: asText(machine.gpu) || asText(machine.cpu) || "unnamed",
      memory: asPositive(machine.memory), sequence: asPositive(data.sequence), compile: compiled.size > 1 ? null : compiled.has(true) };
  } catch {
    return null;
  }
}

/** The mark beside the label of a field that the file sets. */
export const fileMark = (name) => (FIELDS.includes(name) ? h("span", { className: "from-file", id: `from-file-${name}`, hidden: true }, "from the file") : null);

/** Whether the user sets a field. */
export const isEditable = (name) => !$(`in-${name}`).disabled;

export class FileFields {
  constructor() {
    this.previous = null; // the user's values
  }

  /** Show the values of layer costs; null restores the user's values. */
  show(costs) {
    const [gpu, sequence, compile] = FIELDS.map((name) => $(`in-${name}`));
    gpu.querySelector(".from-file")?.remove();
    this.previous ??= { gpu: gpu.value, sequence: sequence.value, compile: compile.checked };
    if (costs) gpu.append(h("option", { className: "from-file", value: "" }, costs.gpu));
    gpu.value = costs ? "" : this.previous.gpu;
    sequence.value = costs ? String(costs.sequence ?? "") : this.previous.sequence;
    sequence.placeholder = costs ? "not set" : "";
    compile.checked = costs ? costs.compile === true : this.previous.compile;
    compile.indeterminate = costs !== null && costs.compile === null;
    for (const name of FIELDS) {
      $(`in-${name}`).disabled = costs !== null;
      $(`from-file-${name}`).hidden = costs === null;
    }
    if (!costs) this.previous = null;
  }
}
