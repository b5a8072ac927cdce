// Files: dropped, opened or pasted; small ones are packed into the page's address, so that a link reproduces them.

import { post } from "./api.js";
import { closeButton, closeOnOutsideClick, h, showMessage } from "./dom.js";

const MAX_PACKED_LENGTH = 12_000; // characters of a file in an address

/** Upload a file; the server answers with `{ kind, id, costs, ... }`. */
export async function upload(name, text) {
  return (await post(`/api/uploads?name=${encodeURIComponent(name)}`, text)).json();
}

/** Call `open(files)` for files that are dropped anywhere on the page; `overlay` is shown while they are dragged. */
export function acceptDrops(overlay, open) {
  let depth = 0;
  const show = (change) => {
    depth = Math.max(0, depth + change);
    overlay.hidden = depth === 0;
  };
  const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
  addEventListener("dragenter", (event) => hasFiles(event) && show(1));
  addEventListener("dragleave", (event) => hasFiles(event) && show(-1));
  addEventListener("dragover", (event) => hasFiles(event) && event.preventDefault());
  addEventListener("drop", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    show(-depth);
    open([...event.dataTransfer.files]);
  });
}

/** Fill a dialog for pasted text and return a function that shows it; an error that `open(text)` throws is shown in it. */
export function createPasteDialog(dialog, { title, about, placeholder, button }, open) {
  const error = h("p", { className: "error", id: "error-paste", role: "alert", hidden: true });
  const area = h("textarea", { id: "pasted", rows: 12, spellcheck: false, placeholder, "aria-labelledby": "paste-title" });
  const use = h("button", { type: "button", className: "strong" }, button);
  use.addEventListener("click", async () => {
    try {
      await open(area.value);
      showMessage(error, "", area);
      dialog.close();
    } catch (raised) {
      showMessage(error, raised.message, area);
    }
  });
  dialog.replaceChildren(h("header", {}, h("h2", { id: "paste-title" }, title), closeButton(dialog)),
    h("p", { className: "about" }, ...about), area, error, h("div", { className: "row" }, use));
  closeOnOutsideClick(dialog);
  return () => dialog.showModal();
}

/** The part of an address after #: `name=packed&...` for the files that are small enough. */
export async function packFiles(files) {
  const parts = [];
  for (const [name, file] of Object.entries(files)) {
    file.packed ??= await pack(file.text);
    file.inLink = file.packed.length <= MAX_PACKED_LENGTH;
    if (file.inLink) parts.push(`${encodeURIComponent(name)}=${file.packed}`);
  }
  return parts.length ? `#${parts.join("&")}` : "";
}

export async function unpackFiles(hash) {
  const files = {};
  for (const part of hash.replace(/^#/, "").split("&")) {
    const [name, packed] = part.split("=");
    if (!packed) continue;
    try {
      files[decodeURIComponent(name)] = { text: await unpack(packed), packed };
    } catch {
      continue; // a damaged link: the server will report that the file is missing
    }
  }
  return files;
}

async function pack(text) {
  const stream = new Blob([text]).stream().pipeThrough(new CompressionStream("deflate-raw"));
  const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
  if (bytes.length > MAX_PACKED_LENGTH) return "x".repeat(MAX_PACKED_LENGTH + 1); // too long in any encoding
  return btoa(String.fromCharCode(...bytes)).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}

async function unpack(packed) {
  const raw = atob(packed.replaceAll("-", "+").replaceAll("_", "/"));
  const bytes = Uint8Array.from(raw, (character) => character.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw"))).text();
}
