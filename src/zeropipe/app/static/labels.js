// Labels of the chart's points: each is near its point and overlaps nothing, or is left out.

import { svg } from "./dom.js";

const FONT_SIZE = 12; // pixels
const DIRECTIONS = [[1, 0], [-1, 0], [0, -1], [0, 1], [1, -1], [1, 1], [-1, -1], [-1, 1]]; // right, left, above, below, corners
const DISTANCES = [0, 12, 26, 44]; // from point to label; from the second, a line connects them
const canvas = document.createElement("canvas").getContext("2d");

/**
 * Text nodes, and lines that connect them, for `points`: { x, y, radius, name, strong }, the important ones first.
 * Labels stay inside `area`, do not overlap the boxes `taken`, and avoid the `lines` [x1, y1, x2, y2].
 */
export function placeLabels(points, area, taken, lines) {
  const boxes = [...taken, ...points.map(({ x, y, radius: r }) => ({ left: x - r, right: x + r, top: y - r, bottom: y + r }))];
  const nodes = [];
  for (const point of points) {
    const found = findBox(point, area, boxes, lines);
    if (!found) continue;
    boxes.push(found.box);
    const { x, y } = point;
    const { left, bottom, right, top } = found.box;
    if (found.ring > 0) {
      const [tx, ty] = [Math.max(left - 2, Math.min(x, right + 2)), Math.max(top, Math.min(y, bottom))];
      const far = Math.hypot(tx - x, ty - y) || 1;
      nodes.push(svg("line", { x1: x + ((tx - x) * 7) / far, y1: y + ((ty - y) * 7) / far, x2: tx, y2: ty, class: "lead", "aria-hidden": "true" }));
    }
    nodes.push(svg("text", { x: left, y: bottom - 3, class: point.strong ? "label front" : "label", "aria-hidden": "true" }, point.name));
  }
  return nodes;
}

function findBox(point, area, boxes, lines) {
  canvas.font = `${point.strong ? 600 : 400} ${FONT_SIZE}px ${getComputedStyle(document.body).fontFamily}`;
  const width = canvas.measureText(point.name).width;
  let found = null;
  DISTANCES.forEach((distance, ring) => DIRECTIONS.forEach(([across, down], direction) => {
    const far = point.radius + 4 + distance;
    const box = boxAt(point, across * far, down * far, across, down, width);
    if (box.left < area.left || box.right > area.right || box.top < area.top || box.bottom > area.bottom) return;
    if (boxes.some((other) => overlap(box, other))) return;
    const cost = 10 * ring + direction + 6 * lines.filter((line) => crosses(box, line)).length;
    if (!found || cost < found.cost) found = { box, cost, ring };
  }));
  return found;
}

function boxAt({ x, y }, dx, dy, across, down, width) {
  const corner = across !== 0 && down !== 0 ? 0.75 : 1;
  const left = across > 0 ? x + dx * corner : across < 0 ? x + dx * corner - width : x - width / 2;
  const middle = y + dy * corner + (down * FONT_SIZE) / 2.4;
  return { left, right: left + width, top: middle - FONT_SIZE / 2 - 1, bottom: middle + FONT_SIZE / 2 + 2 };
}

function overlap(a, b) {
  return a.left < b.right + 2 && a.right > b.left - 2 && a.top < b.bottom && a.bottom > b.top;
}

/** For horizontal and vertical lines. */
function crosses(box, [x1, y1, x2, y2]) {
  return box.left < Math.max(x1, x2) && box.right > Math.min(x1, x2) && box.top < Math.max(y1, y2) + 1 && box.bottom > Math.min(y1, y2) - 1;
}
