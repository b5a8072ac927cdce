// Where boxes are too narrow to draw one by one: bands whose heights are shares of time (bands.py does so in figures).
// Single boxes of a pixel or two would make stripes that are not there. The work is bounded by the pixels, not the boxes.

import { KINDS, LOWER, UPPER, firstAbove } from "./data.js";

const WIDE = 2.2; // device pixels: boxes narrower than this on average make bands
const [STRICT, TOLERANT] = [0.6, 1.6]; // times that, in a place that is unlike the whole
const BLOCK = 32; // device pixels: it is decided for so many at a time, with those on either side
const MOST_RANKS = 4096; // in one image
const MOST_LINES = 32; // of the image that holds a rank's bands, top to bottom
const LEAST_REACH = 6; // device pixels on either side that a share is the mean of
const SHARP_RUN = 10; // device pixels: a longer run of one kind is not blended with what is beside it
const FULL = 0.997; // of the height: the rest is rounding
const FAINTEST = 0.16; // of the height: a short box alone in its pixel stays visible

/** Running sums over all boxes: time by kind, steps; and the time of one round of boxes (one of each look) per rank. */
export function bandSums(timeline) {
  const { size, start, end, kind, half, shade, offsets, ranks } = timeline;
  const times = KINDS.map(() => new Float64Array(size + 1));
  const steps = new Int32Array(size + 1);
  for (let i = 0; i < size; i++) {
    for (const sum of times) sum[i + 1] = sum[i];
    times[kind[i]][i + 1] += (end[i] - start[i]) * (half[i] ? 0.5 : 1);
    steps[i + 1] = steps[i] + (half[i] === LOWER ? 0 : 1);
  }
  const rounds = new Float64Array(ranks);
  for (let rank = 0; rank < ranks; rank++) {
    const [first, last] = [offsets[rank], offsets[rank + 1]];
    const looks = new Set();
    for (let i = first; i < last; i++) looks.add(kind[i] * 256 + shade[i]);
    rounds[rank] = (looks.size * times.reduce((sum, of) => sum + of[last] - of[first], 0)) / Math.max(1, last - first);
  }
  return { times, steps, rounds };
}

/** The image that bands are written to, cleared: some lines of pixels per rank. */
export class Strip {
  constructor() {
    this.canvas = document.createElement("canvas");
    this.context = this.canvas.getContext("2d");
  }

  /** For the ranks from `first` on, as many as it holds: a canvas has a greatest height. */
  clear(width, first, all, height) {
    const ranks = Math.min(MOST_RANKS, all - first);
    this.lines = Math.max(1, Math.min(MOST_LINES, Math.round(height), Math.floor(2048 / ranks)));
    this.width = width;
    this.first = first;
    this.ranks = ranks;
    this.used = false;
    if (this.canvas.width !== width || this.canvas.height !== ranks * this.lines) {
      this.canvas.width = width;
      this.canvas.height = ranks * this.lines;
      this.image = this.context.createImageData(width, ranks * this.lines);
      this.words = new Uint32Array(this.image.data.buffer);
    }
    this.words.fill(0);
  }

  /** Shares of F, B, I and W at a pixel of a rank, from below: W, I, B, F. A line that two of them have part in mixes. */
  put(rank, pixel, share, colours) {
    const { lines, width, words } = this;
    const bottom = ((rank - this.first) * lines + lines - 1) * width + pixel;
    let [level, below] = [0, 0];
    for (let kind = 3; kind >= 0; kind--) {
      if (!share[kind]) continue;
      let line = Math.floor(level);
      const part = level - line;
      level = Math.min(lines, level + share[kind] * lines);
      if (part > 0 && line < lines) words[bottom - line++ * width] = mixed(below, colours[kind], part);
      for (; line < level; line++) words[bottom - line * width] = colours[kind];
      below = colours[kind];
    }
    const part = level - Math.floor(level);
    if (part > 0.001 && part < 0.999) words[bottom - Math.floor(level) * width] = (((255 * part) << 24) | (below & 0xffffff)) >>> 0;
    this.used = true;
  }

  paint(context, layout, scale) {
    if (!this.used) return;
    this.context.putImageData(this.image, 0, 0);
    context.imageSmoothingEnabled = false;
    for (let n = 0; n < this.ranks; n++) {
      context.drawImage(this.canvas, 0, n * this.lines, this.width, this.lines, 0, layout.top(this.first + n), this.width / scale, layout.height);
    }
  }
}

/** `share` of one colour and the rest of another. */
function mixed(one, other, share) {
  let word = 255 << 24;
  for (const shift of [0, 8, 16]) word |= (share * ((one >> shift) & 255) + (1 - share) * ((other >> shift) & 255)) << shift;
  return word >>> 0;
}

/**
 * Divide a row in sight: wide boxes are added to `boxes`, stretches of narrow ones are written to the strip.
 * Blocks hang on times, not on the window, so that nothing changes while it moves.
 */
export function scanRow(timeline, sums, rank, view, perPixel, strip, colours, narrowAll, boxes) {
  const { start, end, offsets } = timeline;
  const last = offsets[rank + 1];
  const long = BLOCK * perPixel;
  const first = Math.floor(view.from / long) - 1;
  const count = Math.ceil(view.to / long) + 1 - first;
  const places = new Int32Array(count + 1); // the first box that ends after the block's left edge
  const [busy, steps] = [new Float64Array(count + 1), new Float64Array(count + 1)];
  const at = new Float64Array(4);
  let i = firstAbove(end, first * long, offsets[rank], last);
  for (let n = 0; n <= count; n++) {
    i = nextAbove(end, (first + n) * long, i, last);
    places[n] = i;
    busy[n] = sumsAt(timeline, sums, (first + n) * long, i, last, at).reduce((a, b) => a + b, 0);
    steps[n] = sums.steps[i] + (i < last && start[i] < (first + n) * long ? 0.5 : 0);
  }
  const most = WIDE * perPixel * (narrowAll ? TOLERANT : STRICT); // where most are alike, all are drawn alike
  const narrow = (n) => {
    const [a, b] = [Math.max(0, n - 1), Math.min(count, n + 2)];
    return steps[b] - steps[a] > 0 && busy[b] - busy[a] < most * (steps[b] - steps[a]);
  };
  let pushed = -1;
  for (let n = 0; n < count; n++) {
    let to = n;
    while (to < count && narrow(to)) to++;
    if (to > n) {
      writeBands(timeline, sums, rank, view, perPixel, strip, colours, (first + n) * long, (first + to) * long, places[n]);
      n = to - 1;
      continue;
    }
    const edge = Math.min(view.to, (first + n + 1) * long);
    for (let box = Math.max(pushed + 1, places[n]); box < last && start[box] < edge; box++) {
      if (end[box] > view.from) boxes.push(box);
      pushed = box;
    }
  }
}

/** Whether the boxes in sight, of all ranks together, are narrow. */
export function isNarrow(timeline, sums, view, perPixel) {
  let [busy, steps] = [0, 0];
  for (let rank = 0; rank < timeline.ranks; rank++) {
    const first = firstAbove(timeline.end, view.from, timeline.offsets[rank], timeline.offsets[rank + 1]);
    const last = firstAbove(timeline.start, view.to, first, timeline.offsets[rank + 1]);
    for (const sum of sums.times) busy += sum[last] - sum[first];
    steps += sums.steps[last] - sums.steps[first];
  }
  return busy < WIDE * perPixel * steps;
}

/**
 * The pixels from one time to another. Idle pixels and long runs of one kind part it into stretches; within one, shares
 * are those of some rounds around.
 */
function writeBands(timeline, sums, rank, view, perPixel, strip, colours, from, to, i) {
  const last = timeline.offsets[rank + 1];
  const base = Math.floor((from - view.from) / perPixel + 1e-6);
  const count = Math.ceil((to - view.from) / perPixel - 1e-6) - base;
  const sum = scratch(4 * (count + 1)); // the four kinds' sums at the left edge of each pixel, and of the one after
  const at = new Float64Array(4);
  for (let n = 0; n <= count; n++) {
    const time = view.from + (base + n) * perPixel;
    i = nextAbove(timeline.end, time, i, last);
    sum.set(sumsAt(timeline, sums, time, i, last, at), 4 * n);
  }
  const covered = (n) => sum[4 * n + 4] + sum[4 * n + 5] + sum[4 * n + 6] + sum[4 * n + 7] - sum[4 * n] - sum[4 * n + 1] - sum[4 * n + 2] - sum[4 * n + 3];
  const round = Math.max(1e-3, sums.rounds[rank] / perPixel);
  const runs = runsOf(sum, count, covered);
  const reach = round * Math.ceil(LEAST_REACH / round); // whole rounds: a regular rhythm has the same shares everywhere
  const value = (kind, x) => {
    const n = Math.min(count - 1, Math.floor(x));
    return sum[4 * n + kind] + (x - n) * (sum[4 * n + 4 + kind] - sum[4 * n + kind]);
  };
  const share = new Float64Array(4);
  for (let a = 0; a < count; a++) {
    if (!(covered(a) > 0)) continue;
    let b = a + (runs[a] >= SHARP_RUN ? runs[a] : 1);
    while (runs[a] < SHARP_RUN && b < count && covered(b) > 0 && runs[b] < SHARP_RUN) b++;
    const [begin, end] = [a + 1 - Math.min(1, covered(a) / perPixel), b - 1 + Math.min(1, covered(b - 1) / perPixel)];
    for (let n = Math.max(a, -base); n < b && base + n < strip.width; n++) {
      const [left, right] = [Math.max(begin, n + 0.5 - reach), Math.min(end, n + 0.5 + reach)];
      let [all, hidden] = [0, 0];
      for (let kind = 0; kind < 4; kind++) {
        const until = right < end ? value(kind, right) : sum[4 * b + kind]; // all of the last pixel, which is not full
        share[kind] = (until - (left > begin ? value(kind, left) : sum[4 * a + kind])) / (Math.max(1e-6, right - left) * perPixel);
        all += share[kind];
        if (!colours[kind]) hidden += share[kind];
      }
      const grow = all > FULL ? 1 / all : all > 0 && all < FAINTEST ? FAINTEST / all : 1;
      for (let kind = 0; kind < 4; kind++) share[kind] = colours[kind] ? share[kind] * grow : 0;
      if (hidden < all) strip.put(rank, base + n, share, colours);
    }
    a = b - 1;
  }
}

/** For each pixel, how many from it on have the one and same kind only; 0 for a mixed one. */
function runsOf(sum, count, covered) {
  const runs = new Int32Array(count + 1);
  let before = -1;
  for (let n = count - 1; n >= 0; n--) {
    const all = covered(n);
    let kind = -1;
    for (let k = 0; k < 4; k++) if (all > 0 && sum[4 * n + 4 + k] - sum[4 * n + k] > 0.99 * all) kind = k;
    runs[n] = kind < 0 ? 0 : kind === before ? runs[n + 1] + 1 : 1;
    before = kind;
  }
  return runs;
}

let kept = new Float64Array(0);

function scratch(size) {
  if (kept.length < size) kept = new Float64Array(2 * size);
  return kept;
}

/** The sums of time by kind up to a time; box `i`, one before `last`, is the first of its row that ends after it. */
function sumsAt(timeline, { times }, time, i, last, out) {
  const { start, end, half } = timeline;
  const inside = i < last && time > start[i] ? (time - start[i]) / (end[i] - start[i]) : 0;
  const next = inside ? i + (half[i] === UPPER ? 2 : 1) : i;
  for (let kind = 0; kind < 4; kind++) out[kind] = times[kind][i] + inside * (times[kind][next] - times[kind][i]);
  return out;
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
