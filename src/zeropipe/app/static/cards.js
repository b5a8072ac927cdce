// One card per schedule: its name and a tiny picture, drawn from the schedule itself. A line below says more.

import { countText } from "/viewer/units.js";
import { h, svg } from "./dom.js";

const SHADES = 2;

export class Cards {
  /** `about` shows what the card under the pointer, or in focus, stands for. */
  constructor(root, about, schedules, toggle) {
    this.cards = new Map();
    for (const facts of schedules) {
      const words = told(facts);
      const node = h(
        "button",
        { type: "button", className: facts.name.length > 16 ? "card long" : "card", "aria-description": words, onclick: () => toggle(facts.name), "data-name": facts.name },
        h("b", {}, facts.name),
        facts.picture ? drawing(facts.picture) : null,
      );
      const show = () => about.replaceChildren(h("b", {}, facts.name), ` ${words}`);
      node.addEventListener("pointerenter", show);
      node.addEventListener("focus", show);
      this.cards.set(facts.name, node);
      root.append(node);
    }
  }

  /** Mark those chosen. */
  mark(names) {
    for (const [name, node] of this.cards) node.setAttribute("aria-pressed", String(names.includes(name)));
  }
}

function told({ summary, limits, stages_per_rank }) {
  const [least, most] = [Math.min(...stages_per_rank), Math.max(...stages_per_rank)];
  const stages = least === most ? `${countText(most, "stage")} per rank` : `${least} to ${most} stages per rank`;
  return [`${summary}.`, `${stages}.`, limits && `Needs ${limits}.`].filter(Boolean).join(" ");
}

export function drawing({ width, height, paths }) {
  const node = svg("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" });
  for (const [key, d] of Object.entries(paths)) {
    node.append(svg("path", { d, class: `fill-${key[0]}${Math.min(Number(key.slice(1)), SHADES - 1)}` }));
  }
  return node;
}

/** The palette as style properties, for both themes: `.fill-F0`, `.kind-F`. */
export function colours(palette) {
  const rules = [];
  for (const [theme, { kinds }] of Object.entries(palette)) {
    for (const [kind, { fill }] of Object.entries(kinds)) {
      fill.forEach((color, shade) => rules.push(`[data-theme="${theme}"] .fill-${kind}${shade}{fill:${color}}`));
      rules.push(`[data-theme="${theme}"] .kind-${kind}{background:${fill[0]}}`);
    }
  }
  return rules.join("\n");
}
