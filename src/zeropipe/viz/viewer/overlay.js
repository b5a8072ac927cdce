// What lies above the boxes: the marked box, dependency arrows, the idle gap under the pointer, the critical path.

import { firstAbove, stepOf } from "./data.js";
import { laneBox } from "./lane.js";
import { boxAt } from "./rows.js";

const MOST_ARROWS = 16;

/** Boxes that box `i` needs. */
export function sourcesOf(timeline, i) {
  return [...new Set(stepOf(timeline, i).flatMap((at) => [timeline.remote[at], timeline.own[at]]))].filter((at) => at >= 0);
}

/** Boxes that need box `i`. */
export function targetsOf(timeline, i) {
  const found = [];
  const { remote, own, size } = timeline;
  for (let at = 0; at < size && found.length < MOST_ARROWS; at++) if (remote[at] === i || own[at] === i) found.push(at);
  return found;
}

export function paintFound(context, timeline, found, palette, view, layout) {
  if (found.gap) return paintGap(context, found, palette, view, layout);
  if (found.piece !== undefined) return outline(context, laneBox(timeline, found.piece, found.rank, view, layout), palette.path, 1.5);
  if (found.level !== undefined) return paintMoment(context, timeline, found.time, palette, view, layout);
  const i = found.box;
  for (const source of sourcesOf(timeline, i)) arrow(context, timeline, source, i, palette, view, layout, true);
  for (const target of targetsOf(timeline, i)) arrow(context, timeline, i, target, palette, view, layout, false);
  outline(context, boxAt(timeline, i, view, layout), palette.path, 2);
}

/** A line through all ranks at a time. */
function paintMoment(context, timeline, time, palette, view, layout) {
  context.fillStyle = palette.path;
  context.globalAlpha = 0.7;
  context.fillRect(Math.round(view.x(time)), 0, 1, layout.top(timeline.ranks - 1) + layout.height);
  context.globalAlpha = 1;
}

function paintGap(context, { rank, gap }, palette, view, layout) {
  const left = Math.max(0, view.x(gap.from));
  const width = Math.min(view.width, view.x(gap.to)) - left;
  const [top, height] = [layout.top(rank), layout.height];
  context.save();
  context.beginPath();
  context.rect(left, top, width, height);
  context.clip();
  context.strokeStyle = palette.soft;
  context.globalAlpha = 0.45;
  context.lineWidth = 1;
  context.beginPath();
  for (let x = left - height; x < left + width; x += 6) {
    context.moveTo(x, top + height);
    context.lineTo(x + height, top);
  }
  context.stroke();
  context.restore();
  outline(context, { x: left, y: top, w: width, h: height }, palette.soft, 1);
}

function outline(context, { x, y, w, h }, color, width) {
  context.strokeStyle = color;
  context.lineWidth = width;
  context.strokeRect(x - 0.5, y - 0.5, Math.max(w + 1, 2), h + 1);
}

/** From the end of one box to the start of another; `into` marks what the box under the pointer needs. */
function arrow(context, timeline, from, to, palette, view, layout, into) {
  const [a, b] = [boxAt(timeline, from, view, layout), boxAt(timeline, to, view, layout)];
  const [x0, y0] = [view.x(timeline.end[from]), a.y + a.h / 2];
  const [x1, y1] = [view.x(timeline.start[to]), b.y + b.h / 2];
  const bend = Math.max(12, Math.min(60, Math.abs(x1 - x0) / 2));
  const lift = timeline.rank[from] === timeline.rank[to] && x1 - x0 > 12 ? layout.height * 0.9 : 0; // over the boxes between
  context.strokeStyle = context.fillStyle = palette.path;
  context.globalAlpha = into ? 0.95 : 0.6;
  context.lineWidth = into ? 1.75 : 1.25;
  context.setLineDash(into ? [] : [5, 3]);
  context.beginPath();
  context.moveTo(x0, y0);
  context.bezierCurveTo(x0 + bend, y0 - lift, x1 - bend, y1 - lift, x1 - 5, y1);
  context.stroke();
  context.setLineDash([]);
  context.beginPath();
  context.moveTo(x1, y1);
  context.lineTo(x1 - 7, y1 - 3.5);
  context.lineTo(x1 - 7, y1 + 3.5);
  context.fill();
  context.globalAlpha = 1;
}

/** The critical path: its boxes stand out, all others fade; a line leads from each to the next. */
export function paintPath(context, timeline, palette, view, layout) {
  const { path } = timeline;
  const starts = timeline.pathStarts ??= Float64Array.from(path, (i) => timeline.start[i]);
  const first = Math.max(0, firstAbove(starts, view.from, 0, path.length) - 2);
  context.fillStyle = palette.paper;
  context.globalAlpha = 0.62;
  const clear = [];
  let edge = -Infinity;
  let row = -1;
  for (let n = first; n < path.length && starts[n] < view.to; n++) {
    const i = path[n];
    const end = view.x(timeline.end[i]);
    if (timeline.rank[i] === row && end - edge < 0.5) continue; // nothing new to see
    clear.push(i);
    [edge, row] = [end, timeline.rank[i]];
  }
  fade(context, timeline, clear, view, layout);
  context.globalAlpha = 1;
  context.strokeStyle = palette.path;
  context.lineJoin = "round";
  context.lineWidth = 2;
  context.beginPath();
  clear.forEach((i, n) => {
    const y = layout.top(timeline.rank[i]) + layout.height / 2;
    if (n) context.lineTo(view.x(timeline.start[i]), y);
    context.moveTo(view.x(timeline.end[i]), y);
  });
  context.stroke();
  for (const i of clear) {
    const box = boxAt(timeline, stepOf(timeline, i)[0], view, layout);
    if (box.w >= 3) outline(context, { ...box, y: layout.top(timeline.rank[i]), h: layout.height }, palette.path, 1.5);
  }
}

/** Cover everything but the boxes in `clear`. */
function fade(context, timeline, clear, view, layout) {
  const cover = new Path2D();
  cover.rect(0, 0, view.width, layout.top(timeline.ranks - 1) + layout.height);
  for (const i of clear) {
    const left = Math.max(0, view.x(timeline.start[i]));
    cover.rect(left, layout.top(timeline.rank[i]), Math.min(view.width, view.x(timeline.end[i])) - left, layout.height);
  }
  context.fill(cover, "evenodd");
}
