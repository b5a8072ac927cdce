// On a narrow screen the settings are folded, so that the results are visible; on a wide screen they are always shown.

import { countText } from "/viewer/units.js";
import { $ } from "./dom.js";

export class FoldedPanel {
  /** `button` opens and closes `panel`, and shows what is set. */
  constructor(panel, button) {
    this.panel = panel;
    this.button = button;
    button.addEventListener("click", () => this.set(!this.isOpen));
    this.set(false);
  }

  get isOpen() {
    return this.panel.classList.contains("open");
  }

  set(open) {
    this.panel.classList.toggle("open", open);
    this.button.setAttribute("aria-expanded", String(open));
  }

  showCounts(numSchedules, numCosts) {
    $("fold-schedules").textContent = countText(numSchedules, "schedule");
    $("fold-costs").textContent = numCosts ? `${countText(numCosts, "cost")} set` : "default costs";
  }

  /** Open the panel if it hides `node`, an error. */
  reveal(node) {
    if (node && !node.checkVisibility() && this.panel.contains(node)) this.set(true);
  }
}
