// The phases of a layer with experts inside a wide box: exchanges are pale, and each has its name where there is room.

import { KINDS, stepOf } from "./data.js";

const NARROWEST = 48; // CSS pixels of a box with phases
const FONT_SIZE = 8;
const LETTER = 0.56; // width of a letter, as a share of the font size

/** The phases of a box: [{name, exchanges, from, to}], in the timeline's unit. */
export function phasesOf(timeline, i) {
  if (!timeline.phases) return [];
  const step = stepOf(timeline, i);
  const key = step.map((box) => `${timeline.stage[box]}${KINDS[timeline.kind[box]]}`).join(" ");
  const isForward = KINDS[timeline.kind[i]] === "F";
  return (timeline.phases[key] ?? [])
    .filter(([kind]) => (kind === "F") === isForward)
    .map(([kind, name, exchanges, from, to]) => ({ name: `${name} ${kind}`, exchanges, from: timeline.start[i] + from, to: timeline.start[i] + to }));
}

/** Paint the phases of box `i`, which lies at `place`, if it is wide enough. */
export function paintPhases(context, timeline, i, paint, view, place) {
  if (!timeline.phases || place.w < NARROWEST) return;
  context.font = `${FONT_SIZE}px system-ui, sans-serif`;
  context.textAlign = "left";
  context.textBaseline = "alphabetic";
  for (const { name, exchanges, from, to } of phasesOf(timeline, i)) {
    const left = Math.max(place.x, view.x(from));
    const right = Math.min(place.x + place.w, view.x(to));
    if (right - left < 1) continue;
    context.fillStyle = paint.palette.lane;
    context.globalAlpha = exchanges ? 0.45 : 0.9;
    context.fillRect(left, place.y, exchanges ? right - left : 0.5, place.h);
    context.globalAlpha = 1;
    context.fillStyle = paint.ink[timeline.kind[i]][timeline.shade[i]];
    const isTall = place.h >= 2 * FONT_SIZE;
    if (isTall && right - left > name.length * LETTER * FONT_SIZE + 4) context.fillText(name, left + 2, place.y + place.h - 2);
  }
}
