// The user's config.json or costs.json on the Plan page. A link carries a small file; a large one stays in the tab's storage.

import { $, h, showMessage } from "./dom.js";
import { acceptDrops, createPasteDialog, packFiles, unpackFiles } from "./files.js";
import { parseLayerCosts } from "./file_fields.js";

export const OWN_FILE = "own"; // its value in the list of models, where no model has that name
const STORAGE_KEY = "zeropipe-plan-file", MAX_NAME_LENGTH = 100;
const EXPECTED = "use a config.json, or costs of layers";
const PASTE = { title: "Paste a config.json or costs.json", button: "Use it",
  about: ["The config of a Hugging Face model directory, or costs of layers as written by ", h("code", {}, "zeropipe profile -o"), " or ", h("code", {}, "estimate -o"), "."],
  placeholder: '{\n  "model_type": "qwen3",\n  "hidden_size": 4096,\n  "num_hidden_layers": 36,\n  ...\n}' };

export class OwnFile {
  /** The server takes `maxLength` characters; `onOpen()` is called when a file was opened. */
  constructor(maxLength, onOpen) {
    this.maxLength = maxLength;
    this.onOpen = onOpen;
    this.file = null;
    this.costs = null; // facts of a file of layer costs
    this.hash = ""; // the part of a link that carries the file, or identifies it in this tab's storage
  }

  /** Restore a file that the page's address names, from the address itself or from this tab's storage. */
  async restore(name) {
    const stored = JSON.parse(sessionStorage.getItem(STORAGE_KEY) ?? "null");
    const text = (await unpackFiles(location.hash))[name]?.text ?? (stored?.hash === location.hash ? stored.text : null);
    if (text !== null) await this.store(name, text);
  }

  /** The part of the form below the list of models. */
  createField() {
    const input = h("input", { type: "file", accept: ".json,application/json", hidden: true, id: "own-file" });
    input.addEventListener("change", () => {
      this.read([...input.files]);
      input.value = "";
    });
    acceptDrops($("dropping"), (files) => this.read(files));
    const paste = createPasteDialog($("paste"), PASTE, (text) => this.open(parseLayerCosts(text) ? "costs.json" : "config.json", text));
    return h("div", { className: "own" }, input,
      h("button", { type: "button", className: "dropzone", onclick: () => input.click() }, h("b", {}, "config.json or costs.json"), h("span", {}, " open yours, or drop it anywhere")),
      h("button", { type: "button", className: "link", onclick: paste }, "or paste it"), h("p", { className: "note", id: "own-note", hidden: !this.file }, this.note()));
  }

  async read([file]) {
    if (!file) return;
    try {
      const mayFit = file.size <= 4 * this.maxLength; // a character has at most 4 bytes
      await this.open(file.name.slice(-MAX_NAME_LENGTH), mayFit ? await file.text() : " ".repeat(this.maxLength + 1));
    } catch (error) {
      showMessage($("error-model"), error.message);
    }
  }

  /** Open a text as the file; throws an Error for one that cannot be planned. */
  async open(name, text) {
    if (text.length > this.maxLength) throw new Error(`${name} is longer than ${this.maxLength / 1024} KiB, the page's limit: ${EXPECTED}`);
    if (!text.trim()) throw new Error(`${name} is empty: ${EXPECTED}`);
    await this.store(name, text);
    showMessage($("error-model"), "", $("in-model"));
    showMessage($("own-note"), this.note());
    this.onOpen();
  }

  async store(name, text) {
    this.file = { text };
    this.costs = parseLayerCosts(text);
    this.name = name;
    const packed = await packFiles({ [name]: this.file });
    this.hash = packed || `#${encodeURIComponent(name)}=${checksum(text)}`;
    try {
      sessionStorage.setItem(STORAGE_KEY, JSON.stringify({ hash: this.hash, text }));
    } catch {
      return; // storage is full or not allowed: the file is lost with a reload
    }
  }

  /** What the file is, and whether a link carries it. */
  note() {
    if (!this.file) return "";
    const carried = this.file.inLink ? "The link carries it." : "It is too large for a link: only this tab keeps it.";
    return `${[this.name, ...(this.costs?.facts ?? configFacts(this.file.text))].join(", ")}. ${carried}`;
  }
}

/** A short text that cannot be unpacked as a file. */
function checksum(text) {
  let sum = 0;
  for (let n = 0; n < text.length; n++) sum = (Math.imul(sum, 31) + text.charCodeAt(n)) | 0;
  return `${text.length}.${sum >>> 0}`;
}

function configFacts(text) {
  try {
    const data = JSON.parse(text);
    const { num_hidden_layers: layers } = { ...data, ...data.text_config };
    return [data.model_type, Number.isInteger(layers) ? `${layers} layers` : ""].filter((fact) => fact && typeof fact === "string");
  } catch {
    return []; // the server reports the error
  }
}
