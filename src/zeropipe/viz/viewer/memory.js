// The memory curve of every rank, below the boxes and on the same time axis.

import { UPPER, firstAbove } from "./data.js";

/** Levels go up to `top` in rows of `layout`; the dashed line is the limit. */
export function paintMemory(context, timeline, palette, view, layout, scale, top, limit) {
  for (let rank = 0; rank < timeline.ranks; rank++) {
    const bottom = layout.top(rank) + layout.height;
    const y = (level) => bottom - (level / top) * (layout.height - 1);
    context.fillStyle = palette.lane;
    context.fillRect(0, layout.top(rank), Math.min(view.width, view.x(timeline.makespan)), layout.height);
    context.fillStyle = palette.memory;
    context.globalAlpha = 0.6;
    const snap = (x) => Math.round(x * scale) / scale; // no seams between rectangles
    let [from, until, high] = [0, 0, 0]; // neighbours of one level make one rectangle
    for (const [x, width, level] of levels(timeline, rank, view, 1 / scale)) {
      if (level !== high || snap(x) > until) {
        if (high > 0) context.fillRect(from, y(high), until - from, bottom - y(high));
        [from, high] = [snap(x), level];
      }
      until = snap(x + width);
    }
    if (high > 0) context.fillRect(from, y(high), until - from, bottom - y(high));
    context.globalAlpha = 1;
    if (limit) {
      context.strokeStyle = palette.limit;
      context.lineWidth = 1;
      context.setLineDash([4, 3]);
      context.beginPath();
      context.moveTo(0, Math.round(y(limit)) + 0.5);
      context.lineTo(view.width, Math.round(y(limit)) + 0.5);
      context.stroke();
      context.setLineDash([]);
    }
  }
}

/** [x, width, level] of one rank's curve in sight, left to right; of the levels within one pixel the highest. */
export function* levels(timeline, rank, view, pixel) {
  const { start, end, during, after, half, offsets } = timeline;
  const last = offsets[rank + 1];
  const perPixel = pixel * (view.span / view.width);
  let i = firstAbove(end, view.from, offsets[rank], last);
  if (i > offsets[rank]) i--; // what it left behind is in sight
  while (i < last && start[i] < view.to) {
    const edge = start[i] + perPixel;
    let level = during[i];
    let next = half[i] === UPPER ? i + 2 : i + 1;
    while (next < last && start[next] < edge) {
      if (during[next] > level) level = during[next];
      next += half[next] === UPPER ? 2 : 1;
    }
    const x = Math.max(0, view.x(start[i]));
    const done = Math.max(x, view.x(end[next - 1]));
    const more = next < last ? Math.max(done, view.x(start[next])) : done;
    if (done > x) yield [x, done - x, level];
    if (more > done) yield [done, more - done, after[next - 1]];
    i = next;
  }
}

/** The level of a rank at a time. */
export function levelAt(timeline, rank, time) {
  const first = timeline.offsets[rank];
  const i = firstAbove(timeline.start, time, first, timeline.offsets[rank + 1]) - 1;
  if (i < first) return null;
  return time < timeline.end[i] ? timeline.during[i] : timeline.after[i];
}
