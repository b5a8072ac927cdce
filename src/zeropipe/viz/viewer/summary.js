// The table that compares timelines.

import { partKey, shareBar } from "./causes.js";
import { element } from "./shapes.js";
import { percentText, sizeText, timeText } from "./units.js";

const HEADS = ["", "makespan", "of best", "idle", "bubble rate", "peak memory"];

export function buildSummary(timelines, causes, select) {
  const head = element("tr", {}, ...HEADS.map((text) => element("th", { scope: "col" }, text)), shareHead(timelines, causes));
  const rows = timelines.map((t, n) => rowOf(t, n, causes, select));
  const parts = [element("caption", {}, "Summary"), element("thead", {}, head), element("tbody", {}, ...rows)];
  const none = timelines.some((t) => t.standing.fits) ? [] : [element("p", { className: "zp-over" }, "None of them fits its memory limit.")];
  return element("div", { className: "zp-summary-box" }, element("table", { className: "zp-summary" }, ...parts), ...none);
}

function rowOf(timeline, n, causes, select) {
  const { fits, best, ofBest } = timeline.standing; // zeropipe.core.ranking says who wins
  const jump = element("button", { type: "button", className: "zp-link", dir: "auto" }, timeline.title);
  jump.addEventListener("click", () => select(n));
  const peak = timeline.peakMemory ? sizeText(Math.max(...timeline.peakMemory), timeline.memoryUnit) : "–";
  const over = fits ? [] : [element("span", { className: "zp-words" }, " over the limit")];
  const cells = [
    element("td", {}, timeText(timeline.makespan, timeline.unit)),
    element("td", { className: best ? "zp-best" : "" }, best ? "best" : ofBest.toFixed(3)),
    element("td", {}, percentText(timeline.idleFraction)),
    element("td", {}, percentText(timeline.bubble)),
    element("td", { className: fits ? "" : "zp-over", title: fits ? "" : "over the limit" }, peak, ...over),
    element("td", { className: "zp-share" }, shareBar(timeline, causes)),
  ];
  return element("tr", {}, element("th", { scope: "row" }, jump), ...cells);
}

/** The heading of the last column names its colours. */
function shareHead(timelines, causes) {
  const there = causes.map((_, n) => timelines.some((t) => t.idle.some((rank) => rank[n] > 0)));
  const names = ["busy", ...causes].map((name, n) => [name, n]).filter(([, n]) => n === 0 || there[n - 1]);
  return element("th", { scope: "col", className: "zp-share" }, ...names.map(([name, n]) => partKey(name, n)));
}
