// The training file of a chosen row: run.toml, as `zeropipe plan -o run.toml` writes it.

import { h, svg } from "./dom.js";
import { saveBlob } from "./downloads.js";
import { copy } from "./tools.js";

const COMMAND = "zeropipe train run.toml --dry-run";

const sheets = () => svg("svg", { viewBox: "0 0 16 16", width: 15, height: 15, fill: "none", stroke: "currentColor", "stroke-width": 1.4, "aria-hidden": true },
  svg("rect", { x: 5.5, y: 5.5, width: 8, height: 8.5, rx: 1.8 }), svg("path", { d: "M3.5 10.5h-.2a1.3 1.3 0 0 1-1.3-1.3V3.3A1.3 1.3 0 0 1 3.3 2h5.9a1.3 1.3 0 0 1 1.3 1.3v.2" }));

/** What is offered below a row; `give(text, beside)` fills it once the file is there. */
export function runFile() {
  let text = "";
  const save = h("button", { type: "button", id: "save-run", disabled: true, onclick: () => saveBlob("run.toml", new Blob([text], { type: "application/toml" })) }, "Download run.toml");
  const told = h("span", { role: "status", className: "unseen" });
  const again = h("button", { type: "button", className: "quiet", "aria-label": "Copy the command", title: "Copy", onclick: async () => {
    const done = await copy(COMMAND);
    told.textContent = done ? "Copied" : "This browser does not let the page copy";
    again.replaceChildren(done ? "✓" : "–");
    setTimeout(() => again.replaceChildren(sheets()), 1500);
  } }, sheets());
  const how = h("p", { className: "note" });
  const node = h("div", { className: "run-file" }, h("div", { className: "row" }, save, h("span", { className: "command" }, h("code", {}, COMMAND), again)), how, told);
  return {
    node,
    give(file, beside) {
      text = file;
      save.disabled = false;
      how.replaceChildren(beside ? `Save it beside ${beside}. ` : "", "The command shows layers, memory and time of each rank; with ", h("code", {}, "--model.path"), " and ", h("code", {}, "--data.path"), " it trains.");
    },
  };
}
