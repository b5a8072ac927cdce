// Mouse, touch and keys.

import { stepOf } from "./data.js";

const WHEEL = 0.0016; // zoom per wheel unit
const STEP = 1.4; // zoom per key
const SCROLLING = 400; // ms after the page has moved in which the wheel goes on moving it

const MOVES = new Set(["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "Home", "End"]);

/** Wheel, drag, pinch and hover on one panel. */
export function listen(panel, state, actions) {
  const { plot } = panel;
  const fingers = new Map();
  let dragged = 0;
  const at = (event) => {
    const box = plot.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  plot.addEventListener("wheel", (event) => {
    const sideways = event.shiftKey ? event.deltaX || event.deltaY : event.deltaX;
    const unit = event.deltaMode === 1 ? 16 : 1;
    if (Math.abs(sideways) > Math.abs(event.deltaY) || event.shiftKey) state.view.pan(sideways * unit);
    else if (event.deltaY > 0 && state.view.fitted) return; // nothing left to zoom out of: let the page scroll
    else if (state.view.fitted && !event.ctrlKey && performance.now() - state.scrolled < SCROLLING) return; // it does already
    else state.view.zoom(Math.exp(-event.deltaY * unit * WHEEL * (event.ctrlKey ? 5 : 1)), at(event)[0] - state.gutter);
    event.preventDefault();
  }, { passive: false });
  plot.addEventListener("pointerdown", (event) => {
    fingers.set(event.pointerId, at(event));
    dragged = 0;
    plot.setPointerCapture(event.pointerId);
  });
  plot.addEventListener("pointermove", (event) => {
    const [x, y] = at(event);
    const old = fingers.get(event.pointerId);
    if (!old) return actions.hover(panel.find(x, y), event);
    if (fingers.size === 2) pinch(fingers, event.pointerId, [x, y], state);
    else if (x !== old[0]) state.view.pan(old[0] - x);
    dragged += Math.abs(x - old[0]);
    fingers.set(event.pointerId, [x, y]);
    if (dragged > 4) actions.hover(null);
  });
  const lift = (event) => {
    if (fingers.delete(event.pointerId) && dragged <= 4 && event.type === "pointerup") actions.hover(panel.find(...at(event)), event);
  };
  plot.addEventListener("pointerup", lift);
  plot.addEventListener("pointercancel", lift);
  plot.addEventListener("pointerleave", () => actions.hover(null));
  plot.addEventListener("dblclick", actions.fit);
  plot.addEventListener("keydown", (event) => key(event, panel, state, actions));
  plot.addEventListener("blur", () => actions.hover(null));
  const { memory } = panel;
  memory.addEventListener("pointermove", (event) => {
    const box = memory.getBoundingClientRect();
    actions.hover(panel.findLevel(event.clientX - box.left, event.clientY - box.top), event);
  });
  memory.addEventListener("pointerleave", () => actions.hover(null));
}

function pinch(fingers, moved, to, state) {
  const [other] = [...fingers].filter(([id]) => id !== moved).map(([, place]) => place);
  const before = Math.abs(fingers.get(moved)[0] - other[0]);
  const after = Math.abs(to[0] - other[0]);
  if (before > 5 && after > 5) state.view.zoom(after / before, (to[0] + other[0]) / 2 - state.gutter);
}

/** What a key does to a panel. */
export function key(event, panel, state, actions) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const { view } = state;
  if (!panel.timeline.size && MOVES.has(event.key)) return; // no box to go to
  const act = {
    ArrowLeft: () => actions.mark(panel, beside(panel, state, -1)),
    ArrowRight: () => actions.mark(panel, beside(panel, state, 1)),
    ArrowUp: () => actions.mark(panel, across(panel, state, -1)),
    ArrowDown: () => actions.mark(panel, across(panel, state, 1)),
    Home: () => actions.mark(panel, edgeOf(panel, state, 0)),
    End: () => actions.mark(panel, edgeOf(panel, state, 1)),
    "+": () => view.zoom(STEP, focusX(panel, state)),
    "=": () => view.zoom(STEP, focusX(panel, state)),
    "-": () => view.zoom(1 / STEP, focusX(panel, state)),
    w: () => view.zoom(STEP, focusX(panel, state)),
    s: () => view.zoom(1 / STEP, focusX(panel, state)),
    a: () => view.pan(-view.width / 8),
    d: () => view.pan(view.width / 8),
    0: actions.fit,
    c: () => actions.toggle("path"),
    m: () => actions.toggle("memory"),
    "?": actions.help,
    Escape: () => actions.hover(null),
  }[event.key];
  if (!act) return;
  act();
  event.preventDefault();
}

function marked(panel, state) {
  return state.found?.panel === panel && state.found.box >= 0 ? state.found.box : -1;
}

function focusX(panel, state) {
  const i = marked(panel, state);
  const { start, end } = panel.timeline;
  return i < 0 ? undefined : Math.max(0, Math.min(state.view.width, state.view.x((start[i] + end[i]) / 2)));
}

/** The first or the last box of the marked one's rank. */
function edgeOf(panel, state, end) {
  const { offsets, rank } = panel.timeline;
  const row = rank[Math.max(0, marked(panel, state))];
  return offsets[row + end] - end;
}

/** The next box of the same rank. */
function beside(panel, state, step) {
  const i = marked(panel, state);
  const { offsets, rank } = panel.timeline;
  if (i < 0) return offsets[0];
  return Math.max(offsets[rank[i]], Math.min(offsets[rank[i] + 1] - 1, i + step));
}

/** The box of the rank above or below at the same time. */
function across(panel, state, step) {
  const i = marked(panel, state);
  const { offsets, rank, start, end, ranks } = panel.timeline;
  if (i < 0) return offsets[0];
  let row = rank[i] + step;
  while (row >= 0 && row < ranks && offsets[row] === offsets[row + 1]) row += step; // ranks without boxes
  if (row < 0 || row >= ranks) return i;
  const middle = (start[i] + end[i]) / 2;
  let best = offsets[row];
  for (let at = best; at < offsets[row + 1] && start[at] <= middle; at++) best = at;
  return stepOf(panel.timeline, best)[0];
}
