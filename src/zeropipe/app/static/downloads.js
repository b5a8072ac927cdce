// Download files that the server draws with the code of the command line.

import { RequestError, post } from "./api.js";
import { $, h, showMessage } from "./dom.js";

const FORMATS = [
  ["html", "Page", "interactive, offline"],
  ["svg", "SVG", "vector, for papers"],
  ["pdf", "PDF", "vector, for papers"],
  ["png", "PNG", "pixels"],
  ["json", "Trace", "for Perfetto; opens here"],
  ["csv", "CSV", "torch's own format"],
];

/** A menu with a button for each format. */
export function createFormatsMenu(label, symbol, act) {
  const node = h("details", { className: "menu" }, h("summary", { "aria-label": label, title: label }, symbol));
  node.append(createFormatButtons((format) => {
    node.open = false;
    act(format);
  }));
  return node;
}

export function createFormatButtons(act) {
  const buttons = FORMATS.map(([format, name, about]) => h("button", { type: "button", "data-format": format, onclick: () => act(format) }, h("b", {}, name), h("small", {}, about)));
  return h("div", { className: "sheet" }, ...buttons);
}

/** Close menus when the user clicks or focuses something else, or presses Escape. */
export function closeMenusOutside() {
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

/** Request a file and save it; the status line shows the progress. */
export async function downloadFile(format, request) {
  const body = { ...request };
  if (["html", "svg", "png", "pdf"].includes(format)) body.theme = document.documentElement.dataset.theme;
  const before = $("status").textContent;
  $("status").textContent = `Creating the .${format} file`;
  try {
    const response = await post(`/api/files/${format}`, body);
    const name = /filename="([^"]+)"/.exec(response.headers.get("Content-Disposition") ?? "")?.[1] ?? "zeropipe";
    saveBlob(name, await response.blob());
    showMessage($("error-page"), "");
    $("status").textContent = `Saved ${name}`;
  } catch (error) {
    if (!(error instanceof RequestError)) throw error;
    $("status").textContent = before;
    showMessage($("error-page"), error.message);
  }
}

/** Let the browser save a blob as a file. */
export function saveBlob(name, blob) {
  const address = URL.createObjectURL(blob);
  const link = h("a", { href: address, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
}
