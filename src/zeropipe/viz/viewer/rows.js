// Paints one timeline's boxes. Boxes wide enough are drawn one by one; narrower ones share a pixel, whose colour is the
// mean of all that happened in it, idle time included. The work is bounded by the pixels, not by the boxes.

import { LOWER, UPPER, firstAbove } from "./data.js";

const WIDE = 2; // device pixels: below this a box is merged with its neighbours
const SMALLEST = 8; // CSS pixels of a label's font
const FAINTEST = 40; // of 255: a short box alone in its pixel stays visible

/** Sums over boxes from left to right of time, and of time times colour, so that any stretch's mean is a difference. */
export function colourSums(timeline, paint) {
  const size = timeline.size;
  const sums = [0, 1, 2, 3].map(() => new Float64Array(size + 1));
  const [time, red, green, blue] = sums;
  for (let i = 0; i < size; i++) {
    const weight = paint.shown(timeline.kind[i]) ? (timeline.end[i] - timeline.start[i]) * (timeline.half[i] ? 0.5 : 1) : 0;
    const [r, g, b] = paint.rgb[timeline.kind[i]][timeline.shade[i]];
    time[i + 1] = time[i] + weight;
    red[i + 1] = red[i] + weight * r;
    green[i + 1] = green[i] + weight * g;
    blue[i + 1] = blue[i] + weight * b;
  }
  return sums;
}

/**
 * Paint all rows into `context` (CSS pixels, `scale` device pixels each). `layout` gives top(rank) and height of a row.
 * Returns how many boxes were drawn one by one.
 */
export function paintRows(context, timeline, sums, paint, view, layout, scale, labels) {
  const width = Math.ceil(view.width * scale);
  const perPixel = view.span / (view.width * scale);
  const strip = stripOf(width, timeline.ranks);
  const boxes = [];
  let merged = false;
  for (let rank = 0; rank < timeline.ranks; rank++) {
    merged = scanRow(timeline, sums, rank, view, perPixel, width, strip.words, boxes) || merged;
  }
  context.imageSmoothingEnabled = false;
  const lane = paint.palette.lane;
  for (let rank = 0; rank < timeline.ranks; rank++) {
    context.fillStyle = lane;
    const end = view.x(timeline.makespan);
    context.fillRect(0, layout.top(rank), Math.min(view.width, end), layout.height);
  }
  if (merged) {
    strip.context.putImageData(strip.image, 0, 0);
    for (let rank = 0; rank < timeline.ranks; rank++) {
      context.drawImage(strip.canvas, 0, rank, width, 1, 0, layout.top(rank), width / scale, layout.height);
    }
  }
  paintBoxes(context, timeline, paint, view, layout, boxes, labels);
  return boxes.length;
}

const strips = new Map();

/** An image of one pixel line per row, cleared. */
function stripOf(width, ranks) {
  const key = `${width}x${ranks}`;
  if (!strips.has(key)) {
    strips.clear();
    const canvas = document.createElement("canvas");
    canvas.width = width;
    canvas.height = ranks;
    const context = canvas.getContext("2d");
    const image = context.createImageData(width, ranks);
    strips.set(key, { canvas, context, image, words: new Uint32Array(image.data.buffer) });
  }
  const strip = strips.get(key);
  strip.words.fill(0);
  return strip;
}

/** Collect the wide boxes of a row in `boxes` and write the pixels of the others into the strip; true if any was. */
function scanRow(timeline, sums, rank, view, perPixel, width, words, boxes) {
  const { start, end, half, offsets } = timeline;
  const last = offsets[rank + 1];
  const before = [0, 0, 0, 0]; // time, red, green, blue: all up to the left edge of a pixel
  const after = [0, 0, 0, 0];
  let i = firstAbove(end, view.from, offsets[rank], last);
  let pixel = 0;
  let merged = false;
  while (i < last && pixel < width && start[i] < view.to) {
    if (end[i] - start[i] >= WIDE * perPixel) {
      boxes.push(i);
      if (half[i] === UPPER) boxes.push(i + 1);
      pixel = Math.max(pixel, Math.floor((end[i] - view.from) / perPixel));
      i += half[i] === UPPER ? 2 : 1;
      continue;
    }
    pixel = Math.max(pixel, Math.floor((start[i] - view.from) / perPixel));
    const edge = view.from + (pixel + 1) * perPixel;
    sumsAt(timeline, sums, view.from + pixel * perPixel, i, last, before);
    i = nextAbove(end, edge, i, last);
    sumsAt(timeline, sums, edge, i, last, after);
    const covered = after[0] - before[0];
    if (covered > 0) {
      const alpha = Math.min(255, Math.max(FAINTEST, Math.round((255 * covered) / perPixel)));
      const r = (after[1] - before[1]) / covered;
      const g = (after[2] - before[2]) / covered;
      const b = (after[3] - before[3]) / covered;
      words[rank * width + pixel] = (alpha << 24) | (b << 16) | (g << 8) | r;
      merged = true;
    }
    pixel++;
  }
  return merged;
}

/** The sums up to a time; box `i`, one before `last`, is the first of its row that ends after it. */
function sumsAt(timeline, sums, time, i, last, out) {
  const { start, end, half } = timeline;
  const inside = i < last && time > start[i] ? (time - start[i]) / (end[i] - start[i]) : 0;
  const next = inside ? i + (half[i] === UPPER ? 2 : 1) : i;
  for (let n = 0; n < 4; n++) out[n] = sums[n][i] + inside * (sums[n][next] - sums[n][i]);
}

/** The first place from `i` whose value is above `limit`: gallop, then halve. */
function nextAbove(values, limit, i, last) {
  let step = 1;
  let low = i;
  while (low + step < last && values[low + step] <= limit) {
    low += step;
    step *= 2;
  }
  return firstAbove(values, limit, low, Math.min(last, low + step + 1));
}

function paintBoxes(context, timeline, paint, view, layout, boxes, labels) {
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
  if (labels !== "none") paintLabels(context, timeline, paint, view, layout, boxes, labels);
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
  return { x: left, y, w: right - left - gap, h };
}

function paintLabels(context, timeline, paint, view, layout, boxes, labels) {
  const fonts = [0, 1].map((split) => Math.min(13, Math.floor(layout.height * (split ? 0.42 : 0.6))));
  if (fonts[0] < SMALLEST) return;
  context.textAlign = "center";
  context.textBaseline = "middle";
  let size = 0;
  for (const i of boxes) {
    const wanted = fonts[timeline.half[i] ? 1 : 0];
    if (!paint.shown(timeline.kind[i])) continue;
    const { x, y, w, h } = boxAt(timeline, i, view, layout);
    const text = labels === "action" ? `${timeline.stage[i]}${"FBIW"[timeline.kind[i]]}${timeline.microbatch[i]}` : String(timeline.microbatch[i]);
    const fits = Math.min(wanted, Math.floor((w - 2) / (text.length * 0.58)));
    if (fits < SMALLEST) continue;
    if (size !== fits) {
      size = fits;
      context.font = `500 ${size}px system-ui, sans-serif`;
    }
    context.fillStyle = paint.ink[timeline.kind[i]][timeline.shade[i]];
    context.fillText(text, x + w / 2, y + h / 2 + 0.5);
  }
}
