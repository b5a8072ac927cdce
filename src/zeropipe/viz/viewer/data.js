// Payload -> typed columns. The other side of payload.py.

const ARRAYS = { i4: Int32Array, u2: Uint16Array, u1: Uint8Array, f4: Float32Array };
export const KINDS = ["F", "B", "I", "W"];
export const UPPER = 1;
export const LOWER = 2;

/** All timelines of a payload, decoded. */
export async function decode(data) {
  return Promise.all(data.timelines.map(async (timeline) => ({ ...timeline, ...columnsOf(timeline, await inflate(timeline.data)) })));
}

async function inflate(text) {
  const stream = new Blob([bytesOf(text)]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}

function bytesOf(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const raw = atob(text);
  const bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  return bytes;
}

function columnsOf(timeline, buffer) {
  const packed = {};
  let at = 0;
  Object.entries(timeline.columns).forEach(([name, type], i) => {
    packed[name] = new ARRAYS[type](buffer, at, timeline.lengths[i]);
    at += packed[name].byteLength;
  });
  return unpacked(timeline, packed);
}

/** Undo the differences: times in the timeline's unit, microbatches, places of what a box needs (-1 for none). */
function unpacked(timeline, { gap, duration, microbatch, remote, own, waited, path, during, after, stage, head, laneStart, laneEnd, laneStage, laneMicrobatch, laneLook }) {
  const size = gap.length;
  const start = new Float64Array(size);
  const end = new Float64Array(size);
  const kind = new Uint8Array(size);
  const half = new Uint8Array(size);
  const checkpointed = new Uint8Array(size);
  const shade = new Uint8Array(size);
  const rank = new Uint16Array(size);
  // with slices, the column has the number of each slice among those of all microbatches
  const secondFrom = (timeline.secondFrom ?? Infinity) * (timeline.slices ?? 1); // from here on: the second copy
  const perTick = Math.round(1 / timeline.tick); // dividing by a whole number keeps decimals exact
  let clock = 0;
  let running = 0;
  for (let i = 0; i < size; i++) {
    clock += gap[i];
    start[i] = timeline.tick < 1 ? clock / perTick : clock * timeline.tick;
    clock += duration[i];
    end[i] = timeline.tick < 1 ? clock / perTick : clock * timeline.tick;
    running += microbatch[i];
    microbatch[i] = running;
    kind[i] = head[i] & 15;
    half[i] = (head[i] >> 4) & 3;
    checkpointed[i] = head[i] >> 6;
    shade[i] = timeline.shades[running >= secondFrom ? 1 : 0][stage[i]];
    remote[i] = remote[i] ? i - remote[i] : -1;
    own[i] = own[i] ? i - own[i] : -1;
    waited[i] = waited[i] ? i - waited[i] : -1;
  }
  for (let r = 0; r < timeline.ranks; r++) rank.fill(r, timeline.offsets[r], timeline.offsets[r + 1]);
  const timeOf = (ticks) => (timeline.tick < 1 ? ticks / perTick : ticks * timeline.tick);
  const lane = laneStart && { start: Float64Array.from(laneStart, timeOf), end: Float64Array.from(laneEnd, timeOf), stage: laneStage, microbatch: laneMicrobatch, look: laneLook, tracks: (timeline.laneOffsets.length - 1) / timeline.ranks };
  return { size, start, end, kind, half, checkpointed, shade, rank, stage, microbatch, remote, own, waited, path, during, after, lane };
}

export function nameOf(timeline, i) {
  return `${timeline.stage[i]}${KINDS[timeline.kind[i]]}${shortNameOf(timeline, i)}`;
}

/** The microbatch of a box, `3`, or with its slice, `3.1`. */
export function microbatchOf(timeline, i) {
  return numberOf(timeline, timeline.microbatch[i]);
}

/** The text of a box: its microbatch, with the mark of a checkpointed F, `3c`. */
export function shortNameOf(timeline, i) {
  return microbatchOf(timeline, i) + (timeline.checkpointed[i] ? "c" : "");
}

/** A number among the microbatches, or among the slices of all of them, as a text. */
export function numberOf(timeline, number) {
  return timeline.slices ? `${Math.floor(number / timeline.slices)}.${number % timeline.slices}` : String(number);
}

/** The first place in [low, high) whose value is above `limit`; values rise. */
export function firstAbove(values, limit, low, high) {
  while (low < high) {
    const middle = (low + high) >>> 1;
    if (values[middle] > limit) high = middle;
    else low = middle + 1;
  }
  return low;
}

/** The boxes of a place: both halves of an Overlap, or the one. */
export function stepOf(timeline, i) {
  if (timeline.half[i] === UPPER) return [i, i + 1];
  if (timeline.half[i] === LOWER) return [i - 1, i];
  return [i];
}
