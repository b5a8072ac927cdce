// The training file of a chosen row: run.toml, as `zeropipe plan -o run.toml` writes it.

import { h, svg } from "./dom.js";
import { saveBlob } from "./downloads.js";
import { copyText } from "./tools.js";

const SCHEDULE_FILE = "run.schedule.json"; // as the training file names it
const COMMAND = "zeropipe train run.toml --dry-run";

const copyIcon = () => svg("svg", { viewBox: "0 0 16 16", width: 15, height: 15, fill: "none", stroke: "currentColor", "stroke-width": 1.4, "aria-hidden": true },
  svg("rect", { x: 5.5, y: 5.5, width: 8, height: 8.5, rx: 1.8 }), svg("path", { d: "M3.5 10.5h-.2a1.3 1.3 0 0 1-1.3-1.3V3.3A1.3 1.3 0 0 1 3.3 2h5.9a1.3 1.3 0 0 1 1.3 1.3v.2" }));

/**
 * The buttons below a row: `node`, which `show(text, schedule, costsFile)` enables when the training file has arrived.
 * `schedule` is the text of a schedule without a name, which is a file beside it; else null.
 */
export function createRunFile() {
  let content = "", own = null;
  const save = h("button", { type: "button", id: "save-run", disabled: true, onclick: () => saveBlob("run.toml", new Blob([content], { type: "application/toml" })) }, "Download run.toml");
  const saveOwn = h("button", { type: "button", id: "save-schedule", hidden: true, onclick: () => saveBlob(SCHEDULE_FILE, new Blob([own], { type: "application/json" })) }, `Download ${SCHEDULE_FILE}`);
  const status = h("span", { role: "status", className: "unseen" });
  const copy = h("button", { type: "button", className: "quiet", "aria-label": "Copy the command", title: "Copy", onclick: async () => {
    const copied = await copyText(COMMAND);
    status.textContent = copied ? "Copied" : "The browser does not allow copying";
    copy.replaceChildren(copied ? "✓" : "–");
    setTimeout(() => copy.replaceChildren(copyIcon()), 1500);
  } }, copyIcon());
  const note = h("p", { className: "note" });
  const node = h("div", { className: "run-file" }, h("div", { className: "row" }, save, saveOwn, h("span", { className: "command" }, h("code", {}, COMMAND), copy)), note, status);
  return {
    node,
    show(text, schedule, costsFile) {
      [content, own] = [text, schedule];
      save.disabled = false;
      saveOwn.hidden = schedule === null;
      const beside = [costsFile, schedule && SCHEDULE_FILE].filter(Boolean).join(" and ");
      note.replaceChildren(beside ? `Save it beside ${beside}. ` : "", "The command shows layers, memory and time of each rank; add ", h("code", {}, "--model.path"), " and ", h("code", {}, "--data.path"), " to train.");
    },
  };
}
