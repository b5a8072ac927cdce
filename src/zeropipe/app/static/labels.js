// Names beside the points of the chart: each where it lies on nothing else, near its point, or not at all.

import { svg } from "./dom.js";

const SIZE = 12; // pixels of the letters
const WAYS = [[1, 0], [-1, 0], [0, -1], [0, 1], [1, -1], [1, 1], [-1, -1], [-1, 1]]; // right, left, above, below, corners
const REACH = [0, 12, 26, 44]; // between point and name; from the second on, a line leads there
const pen = document.createElement("canvas").getContext("2d");

/**
 * Text nodes (and lines that lead to them) for `points`: { x, y, radius, name, strong }, the important ones first.
 * `area` is where names may stand, `taken` are boxes they must keep off, `lines` [x1, y1, x2, y2] those they had better.
 */
export function placeLabels(points, area, taken, lines) {
  const boxes = [...taken, ...points.map(({ x, y, radius: r }) => ({ left: x - r, right: x + r, top: y - r, bottom: y + r }))];
  const made = [];
  for (const point of points) {
    const found = best(point, area, boxes, lines);
    if (!found) continue;
    boxes.push(found.box);
    const { x, y } = point;
    const { left, bottom, right, top } = found.box;
    if (found.ring > 0) {
      const [tx, ty] = [Math.max(left - 2, Math.min(x, right + 2)), Math.max(top, Math.min(y, bottom))];
      const far = Math.hypot(tx - x, ty - y) || 1;
      made.push(svg("line", { x1: x + ((tx - x) * 7) / far, y1: y + ((ty - y) * 7) / far, x2: tx, y2: ty, class: "lead", "aria-hidden": "true" }));
    }
    made.push(svg("text", { x: left, y: bottom - 3, class: point.strong ? "label front" : "label", "aria-hidden": "true" }, point.name));
  }
  return made;
}

function best(point, area, boxes, lines) {
  pen.font = `${point.strong ? 600 : 400} ${SIZE}px ${getComputedStyle(document.body).fontFamily}`;
  const wide = pen.measureText(point.name).width;
  let found = null;
  REACH.forEach((reach, ring) => WAYS.forEach(([across, down], way) => {
    const far = point.radius + 4 + reach;
    const box = boxAt(point, across * far, down * far, across, down, wide);
    if (box.left < area.left || box.right > area.right || box.top < area.top || box.bottom > area.bottom) return;
    if (boxes.some((other) => meet(box, other))) return;
    const cost = 10 * ring + way + 6 * lines.filter((line) => crosses(box, line)).length;
    if (!found || cost < found.cost) found = { box, cost, ring };
  }));
  return found;
}

function boxAt({ x, y }, dx, dy, across, down, wide) {
  const corner = across !== 0 && down !== 0 ? 0.75 : 1;
  const left = across > 0 ? x + dx * corner : across < 0 ? x + dx * corner - wide : x - wide / 2;
  const middle = y + dy * corner + (down * SIZE) / 2.4;
  return { left, right: left + wide, top: middle - SIZE / 2 - 1, bottom: middle + SIZE / 2 + 2 };
}

function meet(a, b) {
  return a.left < b.right + 2 && a.right > b.left - 2 && a.top < b.bottom && a.bottom > b.top;
}

/** Lines here are level or upright. */
function crosses(box, [x1, y1, x2, y2]) {
  return box.left < Math.max(x1, x2) && box.right > Math.min(x1, x2) && box.top < Math.max(y1, y2) + 1 && box.bottom > Math.min(y1, y2) - 1;
}
