// On a phone the settings fold away, so that the results are in sight; on a wide screen they always stand on the left.

import { countText } from "/viewer/units.js";
import { $ } from "./dom.js";

export class Fold {
  /** `button` opens and closes `panel`; it says what is set. */
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

  tell(numSchedules, numCosts) {
    $("fold-schedules").textContent = countText(numSchedules, "schedule");
    $("fold-costs").textContent = numCosts ? `${countText(numCosts, "cost")} set` : "default costs";
  }

  /** An error that is folded away is no help. */
  reveal(node) {
    if (node && !node.checkVisibility() && this.panel.contains(node)) this.set(true);
  }
}
