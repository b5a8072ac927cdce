// Where the time goes: busy, and idle by cause; in shares of all ranks' time from the first start to the last end.

import { element } from "./shapes.js";
import { percentText } from "./units.js";

const MEANINGS = {
  busy: "running actions",
  "warm-up": "before the first action of the rank: nothing has reached it yet",
  "waiting for data": "until another rank has made what the next action needs",
  communication: "what the next action needs is made, and on its way",
  "cool-down": "after the last action of the rank, while others still run",
  offload: "while its activations are copied back from the host",
  sharding: "while its weights are gathered, or its gradients are reduced",
  other: "the data was there, and still the rank did nothing: launches, allocation, noise",
};

export function meaningOf(cause) {
  return MEANINGS[cause] ?? "";
}

/** [[name, share, number of its colour]], "busy" first. */
export function sharesOf(timeline, causes) {
  const all = timeline.makespan * timeline.ranks || 1;
  const idle = causes.map((cause, n) => [cause, timeline.idle.reduce((sum, rank) => sum + rank[n], 0) / all, n + 1]);
  return [["busy", timeline.busy.reduce((a, b) => a + b, 0) / all, 0], ...idle];
}

/** A colour and its name, with what it means for those who point at it. */
export function partKey(name, number, text = name) {
  return element("span", { className: "zp-part-key", title: meaningOf(name) }, element("i", { className: `zp-part-${number}` }), text);
}

/** The shares as one line of words. */
export function shareLine(timeline, causes) {
  const there = sharesOf(timeline, causes).filter(([name, share]) => name === "busy" || share >= 5e-5);
  return there.map(([name, share, number]) => partKey(name, number, `${name} ${percentText(share)}`));
}

/** The shares as a bar. */
export function shareBar(timeline, causes) {
  const parts = sharesOf(timeline, causes).filter(([, share]) => share > 0);
  const description = parts.map(([name, share]) => `${name} ${percentText(share)}`).join(", ");
  const bar = element("div", { className: "zp-bar-share", role: "img", "aria-label": description, title: description });
  for (const [, share, number] of parts) {
    bar.append(element("span", { className: `zp-part zp-part-${number}`, style: `width:${(100 * share).toFixed(2)}%` }));
  }
  return bar;
}

/** What causes mean, for the help. */
export function causeRows(causes) {
  return ["busy", ...causes].map((name, n) =>
    element("tr", {}, element("th", { scope: "row" }, partKey(name, n)), element("td", {}, meaningOf(name))));
}
