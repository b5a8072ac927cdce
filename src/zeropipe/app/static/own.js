// Your own config.json or costs.json on the Plan page: opened, dropped or pasted. A link carries a small one; the tab keeps
// a large one.

import { $, h, tell } from "./dom.js";
import { packFiles, pasteDialog, takeDrops, unpackFiles } from "./files.js";
import { costsIn } from "./said.js";

export const OWN = "own"; // the choice among the models; no model has that name
const KEY = "zeropipe-plan-file", LONGEST_NAME = 100;
const GIVE = "give a config.json, or costs of layers";
const PASTE = { title: "Paste a config.json or costs.json", button: "Use it",
  about: ["The config of a Hugging Face model directory, or the costs of layers that ", h("code", {}, "zeropipe profile -o"), " or ", h("code", {}, "estimate -o"), " wrote."],
  placeholder: '{\n  "model_type": "qwen3",\n  "hidden_size": 4096,\n  "num_hidden_layers": 36,\n  ...\n}' };

export class OwnFile {
  /** `most` are the characters that the server takes; `chosen` is called when there is a new one. */
  constructor(most, chosen) {
    this.most = most;
    this.chosen = chosen;
    this.file = null;
    this.costs = null; // what it says, where it is a file of costs
    this.hash = ""; // the part of a link that carries it, or a mark by which this tab knows it again
  }

  /** What a link calls `name`, from the link itself or from this tab. */
  async restore(name) {
    const kept = JSON.parse(sessionStorage.getItem(KEY) ?? "null");
    const text = (await unpackFiles(location.hash))[name]?.text ?? (kept?.hash === location.hash ? kept.text : null);
    if (text !== null) await this.keep(name, text);
  }

  /** The part of the form below the choice of models. */
  field() {
    const input = h("input", { type: "file", accept: ".json,application/json", hidden: true, id: "own-file" });
    input.addEventListener("change", () => {
      this.read([...input.files]);
      input.value = "";
    });
    takeDrops($("dropping"), (files) => this.read(files));
    const paste = pasteDialog($("paste"), PASTE, (text) => this.take(costsIn(text) ? "costs.json" : "config.json", text));
    return h("div", { className: "own" }, input,
      h("button", { type: "button", className: "dropzone", onclick: () => input.click() }, h("b", {}, "config.json or costs.json"), h("span", {}, " open yours, or drop it anywhere")),
      h("button", { type: "button", className: "link", onclick: paste }, "or paste it"), h("p", { className: "note", id: "own-note", hidden: !this.file }, this.note()));
  }

  async read([file]) {
    if (!file) return;
    try {
      const small = file.size <= 4 * this.most; // bytes of so many characters
      await this.take(file.name.slice(-LONGEST_NAME), small ? await file.text() : " ".repeat(this.most + 1));
    } catch (error) {
      tell($("error-model"), error.message);
    }
  }

  /** Take a text as the file, and choose it; an Error says what is wrong. */
  async take(name, text) {
    if (text.length > this.most) throw new Error(`${name} is longer than ${this.most / 1024} KiB, which is all the page takes: ${GIVE}`);
    if (!text.trim()) throw new Error(`${name} is empty: ${GIVE}`);
    await this.keep(name, text);
    tell($("error-model"), "", $("in-model"));
    tell($("own-note"), this.note());
    this.chosen();
  }

  async keep(name, text) {
    this.file = { text };
    this.costs = costsIn(text);
    this.name = name;
    const packed = await packFiles({ [name]: this.file });
    this.hash = packed || `#${encodeURIComponent(name)}=${mark(text)}`;
    try {
      sessionStorage.setItem(KEY, JSON.stringify({ hash: this.hash, text }));
    } catch {
      return; // no room, or not allowed: then a reload forgets it
    }
  }

  /** What it is, and whether a link can carry it. */
  note() {
    if (!this.file) return "";
    const carried = this.file.inLink ? "The link carries it." : "It is too large for a link: only this tab keeps it.";
    return `${[this.name, ...(this.costs?.facts ?? facts(this.file.text))].join(", ")}. ${carried}`;
  }
}

/** Short, other for another text, and nothing that could be unpacked. */
function mark(text) {
  let sum = 0;
  for (let n = 0; n < text.length; n++) sum = (Math.imul(sum, 31) + text.charCodeAt(n)) | 0;
  return `${text.length}.${sum >>> 0}`;
}

function facts(text) {
  try {
    const data = JSON.parse(text);
    const { num_hidden_layers: layers } = { ...data, ...data.text_config };
    return [data.model_type, Number.isInteger(layers) ? `${layers} layers` : ""].filter((one) => one && typeof one === "string");
  } catch {
    return []; // the server says what is wrong with it
  }
}
