// Paints one timeline's boxes: one by one where they are wide enough, as bands where they are not.

import { Strip, isNarrow, scanRow } from "./bands.js";
import { LOWER, UPPER, nameOf, shortNameOf } from "./data.js";
import { paintPhases } from "./phases.js";

const SMALLEST = 8; // CSS pixels of a label's font
const LARGEST = 13;
const GLYPH = 0.58; // width of a digit, as a share of the font size
const MOST_UNLIKE = 2; // CSS pixels between the fonts of two kinds
const ENOUGH = 0.9; // of a kind's boxes have room for its longest label, or none is labelled

let strip = null; // all panels are painted one after the other

/**
 * Paint all rows into `context` (CSS pixels, `scale` device pixels each). `layout` gives top(rank) and height of a row.
 * Returns how many boxes were drawn one by one, and whether there are bands.
 */
export function paintRows(context, timeline, sums, paint, view, layout, scale, labels) {
  const perPixel = view.span / (view.width * scale);
  const boxes = [];
  const narrow = isNarrow(timeline, sums, view, perPixel);
  let bands = false;
  strip ??= new Strip();
  for (let first = 0; first < timeline.ranks; first += strip.ranks) {
    strip.clear(Math.ceil(view.width * scale), first, timeline.ranks, layout.height * scale);
    context.fillStyle = paint.palette.lane;
    for (let rank = first; rank < first + strip.ranks; rank++) {
      context.fillRect(0, layout.top(rank), Math.min(view.width, view.x(timeline.makespan)), layout.height);
      scanRow(timeline, sums, rank, view, perPixel, strip, paint.words, narrow, boxes);
    }
    strip.paint(context, layout, scale);
    bands ||= strip.used;
  }
  paintBoxes(context, timeline, paint, view, layout, boxes);
  for (const i of boxes) if (paint.shown(timeline.kind[i])) paintPhases(context, timeline, i, paint, view, boxAt(timeline, i, view, layout));
  if (labels !== "none") paintLabels(context, timeline, paint, view, layout, boxes, labels);
  return { drawn: boxes.length, bands };
}

function paintBoxes(context, timeline, paint, view, layout, boxes) {
  const byColour = new Map();
  for (const i of boxes) {
    if (!paint.shown(timeline.kind[i])) continue;
    const colour = paint.fill[timeline.kind[i]][timeline.shade[i]];
    if (!byColour.has(colour)) byColour.set(colour, []);
    byColour.get(colour).push(i);
  }
  for (const [colour, members] of byColour) {
    context.fillStyle = colour;
    for (const i of members) {
      const { x, y, w, h } = boxAt(timeline, i, view, layout);
      context.fillRect(x, y, w, h);
    }
  }
}

/** Where a box lies, in CSS pixels, clipped to the window; a hairline stays free on its right while it is wide. */
export function boxAt(timeline, i, view, layout) {
  const left = Math.max(-2, view.x(timeline.start[i]));
  const right = Math.min(view.width + 2, view.x(timeline.end[i]));
  const gap = right - left > 4 ? 1 : right - left > 2 ? 0.5 : 0;
  const half = timeline.half[i];
  const top = layout.top(timeline.rank[i]);
  const y = half === LOWER ? top + layout.height / 2 : top;
  const h = half ? layout.height / 2 - (half === UPPER && layout.height > 12 ? 0.5 : 0) : layout.height;
  return { x: left, y, w: Math.max(0.5, right - left - gap), h };
}

/** One size for all boxes of a kind, by its longest label in sight; where that has no room, none is labelled. */
function paintLabels(context, timeline, paint, view, layout, boxes, labels) {
  const tallest = [0.6, 0.42].map((share) => Math.min(LARGEST, Math.floor(layout.height * share))); // of a whole box, of half an Overlap
  if (tallest[0] < SMALLEST) return;
  const looks = new Map(); // (kind, half of an Overlap) -> boxes, longest label
  for (const i of boxes) {
    if (!paint.shown(timeline.kind[i])) continue;
    const look = 2 * timeline.kind[i] + (timeline.half[i] ? 1 : 0);
    if (!looks.has(look)) looks.set(look, { members: [], longest: 0 });
    const found = looks.get(look);
    found.members.push(i);
    found.longest = Math.max(found.longest, labelOf(timeline, i, labels).length);
  }
  context.textAlign = "center";
  context.textBaseline = "middle";
  for (const [look, found] of looks) found.size = fontFor(timeline, found.members, found.longest, tallest[look % 2], view);
  const least = Math.min(...[...looks.values()].map(({ size }) => size || LARGEST));
  for (const { members, size } of looks.values()) {
    if (!size) continue;
    const font = Math.min(size, least + MOST_UNLIKE);
    context.font = `500 ${font}px system-ui, sans-serif`;
    for (const i of members) {
      const text = labelOf(timeline, i, labels);
      const { x, y, w, h } = boxAt(timeline, i, view, layout);
      if (w - 2 < text.length * GLYPH * font) continue;
      context.fillStyle = paint.ink[timeline.kind[i]][timeline.shade[i]];
      context.fillText(text, x + w / 2, y + h / 2 + 0.5);
    }
  }
}

function labelOf(timeline, i, labels) {
  return labels === "action" ? nameOf(timeline, i) : shortNameOf(timeline, i);
}

/** The largest font in which the longest label fits enough of the boxes; 0 if there is none. */
function fontFor(timeline, members, longest, tallest, view) {
  const fits = new Int32Array(LARGEST + 1); // boxes by the largest font they have room for
  const perUnit = view.width / view.span;
  for (const i of members) {
    const width = (timeline.end[i] - timeline.start[i]) * perUnit;
    fits[Math.max(0, Math.min(tallest, Math.floor((width - 3) / (longest * GLYPH))))]++;
  }
  let enough = 0;
  for (let size = tallest; size >= SMALLEST; size--) {
    enough += fits[size];
    if (enough >= ENOUGH * members.length) return size;
  }
  return 0;
}
