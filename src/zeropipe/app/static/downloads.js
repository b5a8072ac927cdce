// Files to keep: the server draws them with the code of the command line.

import { $, h, tell } from "./dom.js";
import { Refused, post } from "./wire.js";

export const FORMATS = [
  ["html", "Page", "interactive, offline"],
  ["svg", "SVG", "vector, for papers"],
  ["pdf", "PDF", "vector, for papers"],
  ["png", "PNG", "pixels"],
  ["json", "Trace", "for Perfetto; opens here"],
  ["csv", "CSV", "torch's own format"],
];

/** A menu with one entry per format. */
export function formatsMenu(label, face, act, formats = FORMATS) {
  const node = h("details", { className: "menu" }, h("summary", { "aria-label": label, title: label }, face));
  node.append(sheet((format) => {
    node.open = false;
    act(format);
  }, formats));
  return node;
}

export function sheet(act, formats = FORMATS) {
  const buttons = formats.map(([format, name, about]) => h("button", { type: "button", "data-format": format, onclick: () => act(format) }, h("b", {}, name), h("small", {}, about)));
  return h("div", { className: "sheet" }, ...buttons);
}

/** Menus close when the user goes elsewhere. */
export function closeMenus() {
  const close = (inside) => {
    for (const menu of document.querySelectorAll("details.menu[open]")) if (!menu.contains(inside)) menu.open = false;
  };
  document.addEventListener("pointerdown", (event) => close(event.target));
  document.addEventListener("focusin", (event) => close(event.target));
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    const open = document.querySelector("details.menu[open]");
    open?.querySelector("summary").focus();
    close(null);
  });
}

/** Ask for a file and hand it to the browser; the status line says how it goes. */
export async function saveFile(format, request) {
  const body = { ...request };
  if (["html", "svg", "png", "pdf"].includes(format)) body.theme = document.documentElement.dataset.theme;
  const before = $("status").textContent;
  $("status").textContent = `Making the .${format} file`;
  try {
    const name = await keep(await post(`/api/files/${format}`, body));
    tell($("error-page"), "");
    $("status").textContent = `Saved ${name}`;
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    $("status").textContent = before;
    tell($("error-page"), error.message);
  }
}

/** Hand a response to the browser as a file. */
async function keep(response) {
  const name = /filename="([^"]+)"/.exec(response.headers.get("Content-Disposition") ?? "")?.[1] ?? "zeropipe";
  saveBlob(name, await response.blob());
  return name;
}

/** Hand a blob to the browser as a file. */
export function saveBlob(name, blob) {
  const address = URL.createObjectURL(blob);
  const link = h("a", { href: address, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
}
