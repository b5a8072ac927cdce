// The bar above: what the colours mean (and switch them off and on), views, and the keys.

import { causeRows } from "./causes.js";
import { KINDS } from "./data.js";
import { element } from "./shapes.js";

const KEYS = [
  ["← → ↑ ↓", "from box to box, from rank to rank"],
  ["Home End", "first and last box of the rank"],
  ["+ −  (or W S)", "zoom in and out"],
  ["A D", "move left and right"],
  ["0", "show everything"],
  ["C", "critical path"],
  ["M", "memory"],
  ["Esc", "let go of the marked box"],
  ["mouse", "wheel zooms to the pointer, drag moves, double click fits"],
  ["touch", "drag moves, two fingers zoom"],
];

export function buildBar(state, timelines, actions) {
  const kinds = [...new Set(timelines.flatMap((t) => [...kindsOf(t)]))].sort();
  const legend = element("div", { className: "zp-legend", role: "group", "aria-label": "Kinds of action" });
  for (const kind of kinds) legend.append(kindButton(state, kind, actions));
  if (timelines.some((t) => t.half.includes(1))) {
    const both = element("span", { className: "zp-swatch zp-both" });
    legend.append(element("span", { className: "zp-key" }, both, element("span", { className: "zp-words" }, "overlap: F above, B below"), element("span", { className: "zp-short" }, "F&B")));
  }
  if (timelines.some((t) => t.checkpointed.includes(1))) {
    legend.append(element("span", { className: "zp-key" }, element("b", {}, "c"), element("span", { className: "zp-words" }, "checkpointed")));
  }
  for (const [look, words] of Object.entries(state.data.lane).filter(([name]) => timelines.some((t) => t.laneLooks?.includes(name)))) {
    const thin = element("span", { className: `zp-swatch zp-thin zp-${look}` });
    legend.append(element("span", { className: "zp-key" }, thin, element("span", { className: "zp-words" }, words), element("span", { className: "zp-short" }, words.split(" ")[0])));
  }
  legend.append(element("span", { className: "zp-key" }, element("span", { className: "zp-swatch zp-idle" }), "idle"));
  const buttons = element("div", { className: "zp-buttons" });
  buttons.append(
    toggle("Critical path", "path", state, actions),
    ...(timelines.some((t) => t.during) ? [toggle("Memory", "memory", state, actions)] : []),
    button("−", "Zoom out", () => actions.zoom(1 / 1.6)),
    button("+", "Zoom in", () => actions.zoom(1.6)),
    button("Fit", "Show everything", actions.fit),
    ...(state.themeButton ? [button("◐", "Light or dark", actions.theme)] : []),
    button("?", "Help", () => help.showModal()),
  );
  const help = helpDialog(state.data.causes);
  return element("div", { className: "zp-bar" }, legend, buttons, help);
}

function kindsOf(timeline) {
  const seen = new Set();
  for (let i = 0; i < timeline.size && seen.size < KINDS.length; i++) seen.add(timeline.kind[i]);
  return seen;
}

function kindButton(state, kind, actions) {
  const swatch = element("span", { className: `zp-swatch zp-kind-${KINDS[kind]}` });
  const name = state.data.palette.light.kinds[KINDS[kind]].name;
  const node = element("button", { type: "button", className: "zp-key" }, swatch, element("b", {}, KINDS[kind]), element("span", { className: "zp-words" }, name));
  node.setAttribute("aria-label", `${KINDS[kind]} ${name}`);
  node.setAttribute("aria-pressed", String(!state.hidden.has(kind)));
  node.title = `Show or hide ${name}`;
  node.addEventListener("click", () => {
    if (!state.hidden.delete(kind)) state.hidden.add(kind);
    node.setAttribute("aria-pressed", String(!state.hidden.has(kind)));
    actions.recolour();
  });
  return node;
}

function button(text, title, act) {
  const node = element("button", { type: "button", title, "aria-label": title }, text);
  node.addEventListener("click", act);
  return node;
}

function toggle(text, name, state, actions) {
  const node = element("button", { type: "button", className: `zp-toggle-${name}` }, text);
  const sync = () => node.setAttribute("aria-pressed", String(state[name]));
  node.addEventListener("click", () => actions.toggle(name));
  state.syncs.push(sync);
  sync();
  return node;
}

function helpDialog(causes) {
  const rows = KEYS.map(([keys, what]) => element("tr", {}, element("th", { scope: "row" }, keys), element("td", {}, what)));
  const close = element("button", { type: "button" }, "Close");
  const title = (text) => element("h3", {}, text);
  const why = element("table", {}, ...causeRows(causes));
  const dialog = element("dialog", { className: "zp-help", "aria-label": "Help" }, title("Keys"), element("table", {}, ...rows), title("Where the time goes"), why, close);
  close.addEventListener("click", () => dialog.close());
  return dialog;
}
