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
    context.beginPath();
    for (const [x, width, level] of levels(timeline, rank, view, 1 / scale)) {
      context.rect(x, y(level), width, bottom - y(level));
    }
    context.globalAlpha = 0.55;
    context.fill();
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

/** [x, width, level] of one rank's curve in sight; levels within one pixel give their highest. */
export function* levels(timeline, rank, view, pixel) {
  const { start, end, during, after, half, offsets } = timeline;
  const last = offsets[rank + 1];
  let i = Math.max(offsets[rank], firstAbove(end, view.from, offsets[rank], last) - 1);
  let x = Math.max(0, view.x(start[i] ?? 0));
  let level = i > offsets[rank] ? during[i] : 0;
  while (i < last && start[i] < view.to) {
    const next = half[i] === UPPER ? i + 2 : i + 1;
    const done = view.x(end[i]);
    const more = next < last ? view.x(start[next]) : done;
    level = Math.max(level, during[i]);
    if (more - x >= pixel || next >= last) {
      const split = Math.max(x, Math.min(done, view.width));
      if (split > x) yield [x, Math.max(pixel, split - x), level];
      if (more > done && more > 0) yield [Math.max(0, done), Math.min(more, view.width) - Math.max(0, done), after[next - 1]];
      x = Math.max(0, more);
      level = 0;
    }
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
