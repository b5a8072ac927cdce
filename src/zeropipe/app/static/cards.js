// One card per schedule: its name and a small picture. A line below the cards describes the one under the pointer.

import { countText } from "/viewer/units.js";
import { h, svg } from "./dom.js";

const NUM_SHADES = 2;
const HOLD = 500; // ms from which a touch is held: it describes a card and does not choose it

export class Cards {
  /** `about` describes the card under the pointer or in focus. */
  constructor(root, about, schedules, toggle) {
    this.cards = new Map();
    for (const facts of schedules) {
      const description = describe(facts);
      let touched = Infinity;
      const node = h(
        "button",
        { type: "button", className: facts.name.length > 16 ? "card long" : "card", "aria-description": description, onclick: (event) => event.timeStamp - touched > HOLD || toggle(facts.name), "data-name": facts.name },
        h("b", {}, facts.name),
        facts.picture ? drawPicture(facts.picture) : null,
      );
      const show = () => about.replaceChildren(h("b", {}, facts.name), ` ${description}`);
      node.addEventListener("pointerenter", show);
      node.addEventListener("pointerdown", (event) => { touched = event.pointerType === "touch" ? event.timeStamp : Infinity; });
      node.addEventListener("focus", show);
      this.cards.set(facts.name, node);
      root.append(node);
    }
  }

  /** Mark the chosen schedules. */
  mark(names) {
    for (const [name, node] of this.cards) node.setAttribute("aria-pressed", String(names.includes(name)));
  }
}

function describe({ summary, limits, stages_per_rank }) {
  const [least, most] = [Math.min(...stages_per_rank), Math.max(...stages_per_rank)];
  const stages = least === most ? `${countText(most, "stage")} per rank` : `${least} to ${most} stages per rank`;
  return [`${summary}.`, `${stages}.`, limits && `Needs ${limits}.`].filter(Boolean).join(" ");
}

function drawPicture({ width, height, paths }) {
  const node = svg("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" });
  for (const [key, d] of Object.entries(paths)) {
    node.append(svg("path", { d, class: `fill-${key[0]}${Math.min(Number(key.slice(1)), NUM_SHADES - 1)}` }));
  }
  return node;
}

/** CSS rules for the palette in both themes: `.fill-F0`, `.kind-F`. */
export function paletteRules(palette) {
  const rules = [];
  for (const [theme, { kinds }] of Object.entries(palette)) {
    for (const [kind, { fill }] of Object.entries(kinds)) {
      fill.forEach((color, shade) => rules.push(`[data-theme="${theme}"] .fill-${kind}${shade}{fill:${color}}`));
      rules.push(`[data-theme="${theme}"] .kind-${kind}{background:${fill[0]}}`);
    }
  }
  return rules.join("\n");
}
