// What is under the pointer, in words: a box and what it waited for, or an idle gap and its cause.

import { meaningOf } from "./causes.js";
import { firstAbove, microbatchOf, nameOf, stepOf } from "./data.js";
import { describePiece, heldFrom, isReloaded, reducedAt } from "./lane.js";
import { levelAt } from "./memory.js";
import { phasesOf } from "./phases.js";
import { percentText, sizeText, timeText } from "./units.js";

const [WARM_UP, WAITING, COMMUNICATION, COOL_DOWN, OTHER, SHARDING, OFFLOAD] = [0, 1, 2, 3, 4, 5, 6]; // places in payload.causes and .idle

/** {box} or {gap} of a rank at a time; `lower` asks for the lower half of an Overlap. Null outside the timeline. */
export function hit(timeline, rank, time, lower) {
  if (rank < 0 || rank >= timeline.ranks || time < 0 || time > timeline.makespan) return null;
  const [first, last] = [timeline.offsets[rank], timeline.offsets[rank + 1]];
  const i = firstAbove(timeline.start, time, first, last) - 1;
  if (i >= first && time <= timeline.end[i]) {
    const step = stepOf(timeline, i);
    return { rank, box: step[lower ? step.length - 1 : 0] };
  }
  const before = i >= first ? timeline.end[i] : 0;
  return { rank, gap: pieceAt(timeline, rank, before, i + 1, time) };
}

/** The piece of the idle time between `free` and box `next` that holds `time`. */
function pieceAt(timeline, rank, free, next, time) {
  const first = timeline.offsets[rank];
  if (next >= timeline.offsets[rank + 1]) {
    const reduced = next > first ? reducedAt(timeline, rank, free) : free;
    if (time < reduced) return { from: free, to: reduced, cause: SHARDING, next: -1, source: -1 };
    return { from: reduced, to: timeline.makespan, cause: next > first ? COOL_DOWN : WARM_UP, next: -1, source: -1 };
  }
  const source = timeline.waited[next];
  const produced = source >= 0 ? timeline.end[source] : free;
  const reloaded = stepOf(timeline, next).some((i) => isReloaded(timeline, rank, i));
  const begin = reloaded ? Math.min(timeline.start[next], Math.max(free, produced)) : heldFrom(timeline, rank, next, free, produced);
  if (time >= begin && begin < timeline.start[next]) return { from: begin, to: timeline.start[next], cause: reloaded ? OFFLOAD : SHARDING, next, source: -1 };
  if (next === first) return { from: free, to: begin, cause: WARM_UP, next, source };
  if (source < 0) return { from: free, to: begin, cause: timeline.measured ? OTHER : COMMUNICATION, next, source };
  const made = Math.min(begin, Math.max(free, timeline.end[source]));
  const late = timeline.measured && timeline.end[source] <= free;
  const arrived = late ? Math.min(begin, Math.max(free, timeline.end[source] + timeline.message)) : begin;
  if (time < made) return { from: free, to: made, cause: WAITING, next, source };
  if (time < arrived) return { from: made, to: arrived, cause: COMMUNICATION, next, source };
  return { from: arrived, to: begin, cause: OTHER, next, source: -1 };
}

/** The step before a box on its rank, or -1. */
export function before(timeline, i) {
  const first = stepOf(timeline, i)[0];
  return first > timeline.offsets[timeline.rank[i]] ? first - 1 : -1;
}

/** Lines for the card: {title, tint, lines: [[label, text]]}. */
export function describe(timeline, found, data) {
  if (found.level !== undefined) return describeLevel(timeline, found);
  if (found.piece !== undefined) return describePiece(timeline, found, data.lane);
  return found.gap ? describeGap(timeline, found, data.causes) : describeBox(timeline, found.box, data.palette.light.kinds);
}

function describeBox(timeline, i, kinds) {
  const text = (time) => timeText(time, timeline.unit, 7);
  const name = kinds["FBIW"[timeline.kind[i]]].name;
  const step = stepOf(timeline, i);
  const lines = [
    ["", `stage ${timeline.stage[i]} · microbatch ${microbatchOf(timeline, i)} · rank ${timeline.rank[i]}`],
    ["start", text(timeline.start[i])],
    ["end", text(timeline.end[i])],
    ["duration", text(timeline.end[i] - timeline.start[i])],
  ];
  if (timeline.checkpointed[i]) lines.push(["checkpointed", "its backward computes it again"]);
  if (step.length > 1) lines.push(["together with", nameOf(timeline, step[0] === i ? step[1] : step[0])]);
  lines.push(["waited for", waitText(timeline, i, text)]);
  if (timeline.during) lines.push(["memory", sizeText(timeline.during[i], timeline.memoryUnit)]);
  const exchanged = phasesOf(timeline, i).filter(({ exchanges }) => exchanges).reduce((sum, { from, to }) => sum + to - from, 0);
  if (exchanged) lines.push(["exchanges", text(exchanged)]);
  return { title: `${nameOf(timeline, i)} ${name}`, box: i, lines };
}

function waitText(timeline, i, text) {
  const source = timeline.waited[i];
  const previous = before(timeline, i);
  if (source >= 0) {
    const free = previous >= 0 ? timeline.end[previous] : 0;
    const waited = timeline.start[i] - free;
    return `${nameOf(timeline, source)} on rank ${timeline.rank[source]}${waited > 0 ? ` (idle ${text(waited)})` : ""}`;
  }
  return previous >= 0 ? `nothing: its rank ran ${nameOf(timeline, previous)}` : "nothing";
}

function describeGap(timeline, { rank, gap }, causes) {
  const text = (time) => timeText(time, timeline.unit, 7);
  const lines = [
    ["", meaningOf(causes[gap.cause])],
    ["", `rank ${rank} · ${text(gap.from)} to ${text(gap.to)}`],
    ["duration", text(gap.to - gap.from)],
  ];
  if (gap.next >= 0) lines.push(["next", nameOf(timeline, gap.next)]);
  if (gap.source >= 0) {
    lines.push(["needs", `${nameOf(timeline, gap.source)} on rank ${timeline.rank[gap.source]}, done at ${text(timeline.end[gap.source])}`]);
  }
  if (timeline.during) {
    const level = levelAt(timeline, rank, (gap.from + gap.to) / 2);
    if (level !== null) lines.push(["memory", sizeText(level, timeline.memoryUnit)]);
  }
  return { title: `Idle: ${causes[gap.cause]}`, box: -1, lines };
}

function describeLevel(timeline, { rank, level, time }) {
  const { memoryLimit, memoryUnit, peakMemory, unit } = timeline;
  const lines = [
    ["", `rank ${rank} · at ${timeText(time, unit, 7)}`],
    ["level", sizeText(level, memoryUnit)],
    ["peak of the rank", sizeText(peakMemory[rank], memoryUnit)],
  ];
  if (memoryLimit) lines.push(["limit", `${sizeText(memoryLimit, memoryUnit)} (${percentText(level / memoryLimit)} used)`]);
  return { title: "Memory", box: -1, lines };
}
