// The table that compares timelines.

import { element } from "./shapes.js";
import { percentText, sizeText, timeText } from "./units.js";

const HEADS = ["", "makespan", "to best", "bubble", "peak memory"];

export function buildSummary(timelines, causes, select) {
  const best = Math.min(...timelines.map((t) => t.makespan));
  const head = element("tr", {}, ...HEADS.map((text) => element("th", { scope: "col" }, text)), shareHead(timelines, causes));
  const rows = timelines.map((t, n) => rowOf(t, n, best, causes, select));
  const parts = [element("caption", {}, "Summary"), element("thead", {}, head), element("tbody", {}, ...rows)];
  return element("div", { className: "zp-summary-box" }, element("table", { className: "zp-summary" }, ...parts));
}

function rowOf(timeline, n, best, causes, select) {
  const jump = element("button", { type: "button", className: "zp-link" }, timeline.title);
  jump.addEventListener("click", () => select(n));
  const peak = timeline.peakMemory && Math.max(...timeline.peakMemory);
  const over = timeline.overLimit.length > 0;
  const ratio = timeline.makespan / best;
  const cells = [
    element("td", {}, timeText(timeline.makespan, timeline.unit)),
    element("td", { className: ratio === 1 ? "zp-best" : "" }, ratio === 1 ? "best" : `× ${ratio.toFixed(3)}`),
    element("td", {}, percentText(timeline.bubble)),
    element("td", { className: over ? "zp-over" : "" }, peak === null ? "–" : sizeText(peak, timeline.memoryUnit) + (over ? " over the limit" : "")),
    element("td", { className: "zp-share" }, shareBar(timeline, causes)),
  ];
  return element("tr", {}, element("th", { scope: "row" }, jump), ...cells);
}

/** The heading of the last column names its colours. */
function shareHead(timelines, causes) {
  const there = causes.map((_, n) => timelines.some((t) => t.idle.some((rank) => rank[n] > 0)));
  const names = ["busy", ...causes].map((name, n) => [name, n]).filter(([, n]) => n === 0 || there[n - 1]);
  const keys = names.map(([name, n]) => element("span", { className: "zp-part-key" }, element("i", { className: `zp-part-${n}` }), name));
  return element("th", { scope: "col" }, ...keys);
}

/** Busy and idle time by cause, as shares of all ranks' time. */
function shareBar(timeline, causes) {
  const all = timeline.makespan * timeline.ranks || 1;
  const busy = timeline.busy.reduce((a, b) => a + b, 0) / all;
  const parts = [["busy", busy], ...causes.map((cause, n) => [cause, timeline.idle.reduce((sum, rank) => sum + rank[n], 0) / all])];
  const told = parts.filter(([, share]) => share > 0).map(([name, share]) => `${name} ${percentText(share)}`).join(", ");
  const bar = element("div", { className: "zp-bar-share", role: "img", "aria-label": told, title: told });
  parts.forEach(([name, share], n) => {
    if (share > 0) bar.append(element("span", { className: `zp-part zp-part-${n}`, style: `width:${(100 * share).toFixed(2)}%` }));
  });
  return bar;
}
