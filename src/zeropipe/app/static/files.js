// Files: dropped, chosen or pasted; and small ones packed into the address, so that a link reproduces them.

import { h, tell } from "./dom.js";
import { post } from "./wire.js";

const LINK_ROOM = 12_000; // characters of a packed file in an address

/** Read a file on the server: `{ kind, id, costs, ... }`. */
export async function upload(name, text) {
  return (await post(`/api/uploads?name=${encodeURIComponent(name)}`, text)).json();
}

/** Take files dropped anywhere on the page. */
export function takeDrops(veil, take) {
  let depth = 0;
  const show = (by) => {
    depth = Math.max(0, depth + by);
    veil.hidden = depth === 0;
  };
  const isFile = (event) => event.dataTransfer?.types.includes("Files");
  addEventListener("dragenter", (event) => isFile(event) && show(1));
  addEventListener("dragleave", (event) => isFile(event) && show(-1));
  addEventListener("dragover", (event) => isFile(event) && event.preventDefault());
  addEventListener("drop", (event) => {
    if (!isFile(event)) return;
    event.preventDefault();
    depth = 0;
    veil.hidden = true;
    take([...event.dataTransfer.files]);
  });
}

/** The dialog for a pasted text; what `take(text)` throws is told below it. */
export function pasteDialog(dialog, { title, about, placeholder, button }, take) {
  const error = h("p", { className: "error", id: "error-paste", role: "alert", hidden: true });
  const area = h("textarea", { id: "pasted", rows: 12, spellcheck: false, placeholder, "aria-labelledby": "paste-title" });
  const close = h("button", { type: "button", className: "quiet", "aria-label": "Close", onclick: () => dialog.close() }, "×");
  const use = h("button", { type: "button", className: "strong" }, button);
  use.addEventListener("click", async () => {
    try {
      await take(area.value);
      tell(error, "", area);
      dialog.close();
    } catch (refused) {
      tell(error, refused.message, area);
    }
  });
  dialog.replaceChildren(h("header", {}, h("h2", { id: "paste-title" }, title), close),
    h("p", { className: "about" }, ...about), area, error, h("div", { className: "row" }, use));
  dialog.addEventListener("click", (event) => {
    if (event.target === dialog) dialog.close();
  });
  return () => dialog.showModal();
}

/** The part of an address after #: `name=packed&...` of the files small enough. */
export async function packFiles(files) {
  const parts = [];
  for (const [name, file] of Object.entries(files)) {
    file.packed ??= await pack(file.text);
    file.inLink = file.packed.length <= LINK_ROOM;
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
      continue; // a damaged link: the server will say that the file is missing
    }
  }
  return files;
}

async function pack(text) {
  const stream = new Blob([text]).stream().pipeThrough(new CompressionStream("deflate-raw"));
  const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
  if (bytes.length > LINK_ROOM) return "x".repeat(LINK_ROOM + 1); // too long for a link in any case
  return btoa(String.fromCharCode(...bytes)).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}

async function unpack(packed) {
  const raw = atob(packed.replaceAll("-", "+").replaceAll("_", "/"));
  const bytes = Uint8Array.from(raw, (sign) => sign.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw"))).text();
}
