// The thin lane below a rank's boxes, where stages are sharded: when their weights are gathered, their gradients reduced.

import { firstAbove } from "./data.js";
import { timeText } from "./units.js";

/** Paint the lanes of all ranks. */
export function paintLanes(context, timeline, palette, view, layout) {
  const { lane, laneOffsets, ranks } = timeline;
  if (!lane || !layout.lane) return;
  for (let rank = 0; rank < ranks; rank++) {
    const top = layout.top(rank) + layout.height + 1;
    let edge = -1; // where the piece before ends, so that thousands of narrow ones cost no more than the pixels
    for (let i = laneOffsets[rank]; i < laneOffsets[rank + 1] && lane.start[i] < view.to; i++) {
      if (lane.end[i] < view.from) continue;
      const left = Math.max(0, view.x(lane.start[i]));
      const right = Math.max(left + 1, Math.min(view.width, view.x(lane.end[i])));
      if (right <= edge) continue;
      context.fillStyle = lane.reduces[i] ? palette.reduce : palette.unshard;
      context.fillRect(left, top, right - left - (right - left > 4 ? 1 : 0), layout.lane);
      edge = right;
    }
  }
}

export function laneBox(timeline, i, rank, view, layout) {
  const [left, right] = [view.x(timeline.lane.start[i]), view.x(timeline.lane.end[i])];
  return { x: left, y: layout.top(rank) + layout.height + 1, w: Math.max(1, right - left), h: layout.lane };
}

/** The piece of a rank's lane at a time, or null. */
export function hitLane(timeline, rank, time, slack) {
  const { lane, laneOffsets } = timeline;
  if (rank < 0 || rank >= timeline.ranks) return null;
  const i = firstAbove(lane.start, time + slack, laneOffsets[rank], laneOffsets[rank + 1]) - 1;
  return i >= laneOffsets[rank] && time <= lane.end[i] + slack ? { rank, piece: i } : null;
}

export function describePiece(timeline, { rank, piece }, words) {
  const { lane, unit } = timeline;
  const text = (time) => timeText(time, unit, 7);
  const reduces = lane.reduces[piece];
  return {
    title: `${lane.stage[piece]}${reduces ? "REDUCE_GRAD" : "UNSHARD"} ${reduces ? words.reduce : words.unshard}`,
    box: -1,
    look: reduces ? "reduce" : "unshard",
    lines: [
      ["", `stage ${lane.stage[piece]} · rank ${rank}`],
      ["start", text(lane.start[piece])],
      ["end", text(lane.end[piece])],
      ["duration", text(lane.end[piece] - lane.start[piece])],
    ],
  };
}

/** From when on the wait before box `next` is one for its stage's weights; its start if it is none. As sharding.py. */
export function heldFrom(timeline, rank, next, free, made) {
  const { lane, laneOffsets, start, stage, kind } = timeline;
  const begin = start[next];
  if (!lane || kind[next] === 3) return begin; // a W reads no weights
  for (let i = firstAbove(lane.start, begin, laneOffsets[rank], laneOffsets[rank + 1]) - 1; i >= laneOffsets[rank]; i--) {
    if (lane.reduces[i] || lane.stage[i] !== stage[next]) continue;
    return lane.end[i] >= begin && lane.start[i] < begin ? Math.min(begin, Math.max(free, made, lane.start[i])) : begin;
  }
  return begin;
}

/** When the last gradients of a rank are reduced; `free` if that is before. */
export function reducedAt(timeline, rank, free) {
  const { lane, laneOffsets } = timeline;
  let last = free;
  for (let i = lane ? laneOffsets[rank] : 0; lane && i < laneOffsets[rank + 1]; i++) if (lane.reduces[i]) last = Math.max(last, lane.end[i]);
  return last;
}
