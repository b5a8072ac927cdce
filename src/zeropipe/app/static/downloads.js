// Files to keep: the server draws them with the code of the command line.

import { h } from "./dom.js";

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

/** Hand a response to the browser as a file. */
export async function save(response) {
  const name = /filename="([^"]+)"/.exec(response.headers.get("Content-Disposition") ?? "")?.[1] ?? "zeropipe";
  const address = URL.createObjectURL(await response.blob());
  const link = h("a", { href: address, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
  return name;
}
