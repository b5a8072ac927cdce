// The thin lane below a rank's boxes: weights that are gathered, gradients that are reduced, copies to the host and back.
// What runs at the same time has tracks of its own, one above the other.

import { KINDS, firstAbove, numberOf } from "./data.js";
import { timeText } from "./units.js";

const ACTIONS = ["UNSHARD", "REDUCE_GRAD", "OFFLOAD", "RELOAD"]; // by the look of a piece
const LOOK = { unshard: 0, reduce: 1, offload: 2, reload: 3 }; // places in payload.lane

/** Where a track's pieces begin and end. */
function rangeOf({ lane, laneOffsets }, rank, track) {
  const at = rank * lane.tracks + track;
  return [laneOffsets[at], laneOffsets[at + 1]];
}

/** The track of a look, or -1. */
function trackOf({ laneLooks }, look) {
  if (look < LOOK.offload) return laneLooks.includes("unshard") ? 0 : -1;
  return laneLooks.includes("reload") ? (laneLooks.includes("unshard") ? 1 : 0) + look - LOOK.offload : -1;
}

/** Paint the lanes of all ranks. */
export function paintLanes(context, timeline, palette, view, layout, looks) {
  const { lane, ranks } = timeline;
  if (!lane || !layout.lane) return;
  const height = heightOf(timeline, layout);
  for (let rank = 0; rank < ranks; rank++) {
    for (let track = 0; track < lane.tracks; track++) {
      const [first, last] = rangeOf(timeline, rank, track);
      const top = topOf(timeline, layout, rank, track);
      let edge = -1; // where the piece before ends, so that thousands of narrow ones cost no more than the pixels
      for (let i = first; i < last && lane.start[i] < view.to; i++) {
        if (lane.end[i] < view.from) continue;
        const left = Math.max(0, view.x(lane.start[i]));
        const right = Math.max(left + 1, Math.min(view.width, view.x(lane.end[i])));
        if (right <= edge) continue;
        context.fillStyle = palette[looks[lane.look[i]]];
        context.fillRect(left, top, right - left - (right - left > 4 ? 1 : 0), height);
        edge = right;
      }
    }
  }
}

function topOf({ lane }, layout, rank, track) {
  return layout.top(rank) + layout.height + 1 + (track * layout.lane) / lane.tracks;
}

function heightOf({ lane }, layout) {
  return lane.tracks > 1 ? layout.lane / lane.tracks - 1 : layout.lane;
}

export function laneBox(timeline, i, rank, view, layout) {
  const { lane } = timeline;
  const [left, right] = [view.x(lane.start[i]), view.x(lane.end[i])];
  return { x: left, y: topOf(timeline, layout, rank, trackOf(timeline, lane.look[i])), w: Math.max(1, right - left), h: heightOf(timeline, layout) };
}

/** The piece of a rank's lane at a time and a height, or null. */
export function hitLane(timeline, rank, y, time, slack, layout) {
  const { lane, ranks } = timeline;
  if (rank < 0 || rank >= ranks) return null;
  const share = (y - topOf(timeline, layout, rank, 0)) / layout.lane;
  const track = Math.max(0, Math.min(lane.tracks - 1, Math.floor(share * lane.tracks)));
  const [first, last] = rangeOf(timeline, rank, track);
  const i = firstAbove(lane.start, time + slack, first, last) - 1;
  return i >= first && time <= lane.end[i] + slack ? { rank, piece: i } : null;
}

export function describePiece(timeline, { rank, piece }, words) {
  const { lane, unit } = timeline;
  const text = (time) => timeText(time, unit, 7);
  const look = lane.look[piece];
  const [name, meaning] = Object.entries(words)[look];
  const microbatch = look < LOOK.offload ? "" : numberOf(timeline, lane.microbatch[piece]);
  return {
    title: `${lane.stage[piece]}${ACTIONS[look]}${microbatch} ${meaning}`,
    box: -1,
    look: name,
    lines: [
      ["", `stage ${lane.stage[piece]}${microbatch && ` · microbatch ${microbatch}`} · rank ${rank}`],
      ["start", text(lane.start[piece])],
      ["end", text(lane.end[piece])],
      ["duration", text(lane.end[piece] - lane.start[piece])],
    ],
  };
}

/** From when on the wait before box `next` is one for its stage's weights; its start if it is none. As explain.py. */
export function heldFrom(timeline, rank, next, free, made) {
  const { lane, start, stage, kind } = timeline;
  const begin = start[next];
  if (!lane || trackOf(timeline, LOOK.unshard) < 0 || KINDS[kind[next]] === "W") return begin; // a W reads no weights
  const [first, last] = rangeOf(timeline, rank, trackOf(timeline, LOOK.unshard));
  for (let i = firstAbove(lane.start, begin, first, last) - 1; i >= first; i--) {
    if (lane.look[i] !== LOOK.unshard || lane.stage[i] !== stage[next]) continue;
    return lane.end[i] >= begin && lane.start[i] < begin ? Math.min(begin, Math.max(free, made, lane.start[i])) : begin;
  }
  return begin;
}

/** When the last gradients of a rank are reduced; `free` if that is before. */
export function reducedAt(timeline, rank, free) {
  const { lane } = timeline;
  if (!lane || trackOf(timeline, LOOK.reduce) < 0) return free;
  const [first, last] = rangeOf(timeline, rank, trackOf(timeline, LOOK.reduce));
  let latest = free;
  for (let i = first; i < last; i++) if (lane.look[i] === LOOK.reduce) latest = Math.max(latest, lane.end[i]);
  return latest;
}

/** Whether the RELOAD of a box ended when the box started, or later. As explain.py. */
export function isReloaded(timeline, rank, i) {
  const { lane, start, stage, microbatch, kind } = timeline;
  if (!lane || trackOf(timeline, LOOK.reload) < 0 || !["B", "I"].includes(KINDS[kind[i]])) return false;
  const [first, last] = rangeOf(timeline, rank, trackOf(timeline, LOOK.reload));
  for (let at = first; at < last; at++) {
    if (lane.stage[at] === stage[i] && lane.microbatch[at] === microbatch[i]) return lane.end[at] >= start[i];
  }
  return false;
}
