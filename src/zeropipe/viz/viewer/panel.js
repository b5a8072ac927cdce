// One timeline on the page: its heading, its rows, its memory, and the layer above them.

import { bandSums } from "./bands.js";
import { shareLine } from "./causes.js";
import { hit } from "./explain.js";
import { hitLane, paintLanes } from "./lane.js";
import { levelAt, levels, paintMemory } from "./memory.js";
import { paintFound, paintPath } from "./overlay.js";
import { paintRows } from "./rows.js";
import { element, prepare } from "./shapes.js";
import { countText, percentText, ruler, sizeText, timeText } from "./units.js";

const ROW_SPACE = 0.14; // of a row's height, below it
const TALLEST = 8000; // CSS pixels
const LANE = 6; // CSS pixels below a row's boxes, for gathers and reductions, or copies
const TRACK = 4; // for each of several that run at the same time
const EDGE = 2; // above the first row: room for its outline

export class Panel {
  constructor(timeline, state) {
    this.timeline = timeline;
    this.state = state;
    this.rows = element("canvas", { "aria-hidden": "true" });
    this.layer = element("canvas", { className: "zp-layer", "aria-hidden": "true" });
    this.plot = element("div", { className: "zp-plot", tabIndex: 0, role: "application", "aria-label": this.words() }, this.rows, this.layer);
    this.plot.setAttribute("aria-roledescription", "timeline");
    this.memory = element("canvas", { "aria-hidden": "true" });
    this.memoryBox = element("div", { className: "zp-memory" }, element("div", { className: "zp-facts" }, this.memoryWords()), this.memory);
    this.node = element(
      "section", { className: "zp-panel", "aria-label": timeline.title },
      this.heading(), this.shares(), this.plot, this.memoryBox,
    );
  }

  words() {
    const t = this.timeline;
    return `${t.title}: ${countText(t.ranks, "rank")}, makespan ${timeText(t.makespan, t.unit)}, idle ${percentText(t.idleFraction)}. `
      + "Arrow keys move from box to box, plus and minus zoom, 0 fits, question mark lists all keys.";
  }

  heading() {
    const t = this.timeline;
    const peak = t.peakMemory ? ` · peak memory ${sizeText(Math.max(...t.peakMemory), t.memoryUnit)}` : "";
    const sizes = [countText(t.ranks, "rank"), countText(t.stages, "stage"), countText(t.microbatches, "microbatch"), ...(t.slices ? [countText(t.slices, "slice")] : [])].join(" · ");
    return element(
      "header", { className: "zp-heading" },
      element("h2", { dir: "auto" }, t.title),
      element("span", { className: t.measured ? "zp-tag zp-measured" : "zp-tag" }, t.measured ? "measured" : "simulated"),
      element("span", { className: "zp-facts" }, sizes),
      element("span", { className: "zp-facts zp-right" }, `makespan ${timeText(t.makespan, t.unit)} · idle ${percentText(t.idleFraction)}${peak}`),
    );
  }

  /** Where the time of all ranks goes, and what is said of the picture. */
  shares() {
    const short = element("span", { className: "zp-short" }, "bands: shares of time");
    const long = element("span", { className: "zp-words" }, "narrow boxes: heights are shares of time, zoom in to see each");
    this.note = element("span", { className: "zp-note zp-off" }, long, short);
    this.pathNote = element("span", { className: "zp-path-note", hidden: true }, pathWords(this.timeline));
    return element("div", { className: "zp-facts zp-shares" }, ...shareLine(this.timeline, this.state.data.causes), this.pathNote, this.note);
  }

  /** The scale of the memory curves. */
  memoryWords() {
    const { memoryUnit, memoryLimit } = this.timeline;
    const limit = memoryLimit === null ? "" : `, dashed: the limit ${sizeText(memoryLimit, memoryUnit)}`;
    return `memory, full height ${sizeText(this.memoryTop, memoryUnit)}${limit}`;
  }

  get memoryTop() {
    return Math.max(...(this.timeline.peakMemory ?? [0]), this.timeline.memoryLimit ?? 0) || 1;
  }

  /** Rows of all ranks: narrow when there are many. */
  get layout() {
    const { ranks } = this.timeline;
    const pitch = ranks <= 8 ? 36 : ranks <= 16 ? 28 : ranks <= 32 ? 20 : ranks <= 64 ? 14 : least(ranks);
    const tracks = this.timeline.lane?.tracks ?? 0;
    const lane = tracks > 1 ? TRACK * tracks : tracks * LANE;
    return rowsOf(this.stretched(pitch, 56, 0.5) + (pitch > 8 ? lane : 0), ranks, pitch > 8 ? lane : 0);
  }

  /** A wider pitch, up to `most`, if the rows of all panels fit into `share` of the window. */
  stretched(pitch, most, share) {
    return Math.max(pitch, Math.min(most, Math.floor((share * innerHeight) / this.state.allRanks)));
  }

  get memoryLayout() {
    const { ranks } = this.timeline;
    const pitch = ranks <= 8 ? 26 : ranks <= 16 ? 20 : ranks <= 32 ? 14 : least(ranks);
    return rowsOf(this.stretched(pitch, 36, 0.22), ranks);
  }

  get visible() {
    const { top, bottom } = this.node.getBoundingClientRect();
    return this.state.printing || (bottom > -200 && top < innerHeight + 200);
  }

  /** Out of sight, too, it is as tall as when it is painted: the page does not jump while it is scrolled. */
  reserve() {
    this.rows.style.height = `${this.layout.total}px`;
    this.memory.style.height = `${this.memoryLayout.total}px`;
    this.memoryBox.hidden = !(this.state.memory && this.timeline.during);
  }

  paint() {
    this.reserve();
    if (!this.visible) return;
    const { view, paint, scale, gutter } = this.state;
    this.sums ??= bandSums(this.timeline);
    const context = prepare(this.rows, gutter + view.width, this.layout.total, scale);
    this.rankNames(context, this.layout);
    within(context, gutter, view.width, this.layout.total, () => {
      this.grid(context, this.layout.total);
      this.painted = paintRows(context, this.timeline, this.sums, paint, view, this.layout, scale, this.state.labels);
      paintLanes(context, this.timeline, paint.palette, view, this.layout, Object.keys(this.state.data.lane));
    });
    this.note.classList.toggle("zp-off", !this.painted.bands);
    this.pathNote.hidden = !this.state.path;
    this.paintMemory();
    this.paintLayer();
  }

  paintMemory() {
    const { view, paint, scale, gutter } = this.state;
    if (this.memoryBox.hidden) return;
    const layout = this.memoryLayout;
    const limit = this.timeline.memoryLimit;
    const context = prepare(this.memory, gutter + view.width, layout.total, scale);
    this.rankNames(context, layout);
    within(context, gutter, view.width, layout.total, () => {
      this.grid(context, layout.total);
      paintMemory(context, this.timeline, paint.palette, view, layout, scale, this.memoryTop * 1.05, limit);
      this.peaks(context, layout, paint.palette);
    });
  }

  peaks(context, layout, palette) {
    if (layout.height < 11) return;
    const { peakMemory, memoryUnit, overLimit } = this.timeline;
    context.font = "10px system-ui, sans-serif";
    context.textAlign = "right";
    context.textBaseline = "top";
    context.strokeStyle = palette.lane;
    context.lineWidth = 3;
    peakMemory.forEach((peak, rank) => {
      const [text, x, y] = [`peak ${sizeText(peak, memoryUnit)}`, this.state.view.width - 5, layout.top(rank) + 2];
      context.strokeText(text, x, y); // a halo, to be read above the limit line
      context.fillStyle = overLimit.includes(rank) ? palette.limit : palette.ink;
      context.fillText(text, x, y);
    });
  }

  /** Marks, arrows and the critical path; cheap, so that hovering never repaints the boxes. */
  paintLayer() {
    const { view, paint, scale, gutter, found, path } = this.state;
    const context = prepare(this.layer, gutter + view.width, this.layout.total, scale);
    within(context, gutter, view.width, this.layout.total, () => {
      if (path) paintPath(context, this.timeline, paint.palette, view, this.layout);
      if (found?.panel === this) paintFound(context, this.timeline, found, paint.palette, view, this.layout);
    });
  }

  rankNames(context, layout) {
    const { paint, gutter } = this.state;
    const size = Math.min(12, Math.max(8, layout.height * 0.62));
    const every = Math.max(1, Math.ceil((size + 1) / layout.pitch));
    context.font = `${size}px system-ui, sans-serif`;
    context.textAlign = "right";
    context.textBaseline = "middle";
    context.fillStyle = paint.palette.soft;
    for (let rank = 0; rank < this.timeline.ranks; rank += every) {
      context.fillText(gutter > 50 ? `rank ${rank}` : String(rank), gutter - 8, layout.top(rank) + layout.height / 2);
    }
  }

  grid(context, height) {
    const { view, paint } = this.state;
    context.fillStyle = paint.palette.line;
    context.globalAlpha = 0.55;
    for (const { at } of ruler(view.from, view.to, Math.max(2, view.width / 90), this.timeline.unit).ticks) {
      context.fillRect(Math.round(view.x(at)), 0, 1, height);
    }
    context.globalAlpha = 1;
  }

  /** What lies at a place of the plot, in its CSS pixels. */
  find(x, y) {
    const { view, gutter, paint } = this.state;
    const layout = this.layout;
    const rank = Math.floor((y - EDGE) / layout.pitch);
    if (layout.lane && x >= gutter && y > layout.top(rank) + layout.height) {
      const piece = hitLane(this.timeline, rank, y, view.time(x - gutter), (2 * view.span) / view.width, layout);
      return piece && { ...piece, panel: this };
    }
    const lower = y - layout.top(rank) > layout.height / 2;
    const found = x >= gutter ? hit(this.timeline, rank, view.time(x - gutter), lower) : null;
    if (!found || (found.box !== undefined && !paint.shown(this.timeline.kind[found.box]))) return null;
    return { ...found, panel: this };
  }

  /** The memory level at a place of the memory's canvas. */
  findLevel(x, y) {
    const { view, gutter } = this.state;
    const rank = Math.floor((y - EDGE) / this.memoryLayout.pitch);
    const time = view.time(x - gutter);
    if (x < gutter || rank < 0 || rank >= this.timeline.ranks || time < 0 || time > this.timeline.makespan) return null;
    return { rank, level: levelAt(this.timeline, rank, time) ?? 0, time, panel: this };
  }

  /** The levels in sight, for tests and tools. */
  curve(rank) {
    return [...levels(this.timeline, rank, this.state.view, 1)];
  }
}

/** The critical path in words. */
function pathWords({ path, start, end, makespan, unit }) {
  const work = path.reduce((sum, i) => sum + end[i] - start[i], 0);
  return `critical path: ${path.length} actions take ${timeText(work, unit, 4)}, messages and pauses ${timeText(Math.max(0, makespan - work), unit, 4)}`;
}

/** The pitch of very many rows: a canvas has a greatest height. */
function least(ranks) {
  const pitch = Math.min(9, TALLEST / ranks);
  return pitch > 1 ? Math.floor(pitch) : pitch;
}

function rowsOf(pitch, ranks, lane = 0) {
  const height = pitch > 4 ? Math.round((pitch - lane) * (1 - ROW_SPACE)) : pitch;
  return { pitch, height, lane: lane && lane - 1, total: EDGE + pitch * ranks, top: (rank) => EDGE + rank * pitch };
}

function within(context, left, width, height, draw) {
  context.save();
  context.translate(left, 0);
  context.beginPath();
  context.rect(0, 0, width, height);
  context.clip();
  draw();
  context.restore();
}
