// Colours and canvases.

/** A canvas sharp on this screen, filling `element`'s width and `height` pixels; returns its context in CSS pixels. */
export function prepare(canvas, width, height, scale) {
  const [w, h] = [Math.max(1, Math.round(width * scale)), Math.max(1, Math.round(height * scale))];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

function rgbOf(color) {
  return [1, 3, 5].map((i) => parseInt(color.slice(i, i + 2), 16));
}

/** The mean of some colours as a pixel's 32 bits. */
function wordOf(colors) {
  const [r, g, b] = [0, 1, 2].map((n) => Math.round(colors.reduce((sum, color) => sum + rgbOf(color)[n], 0) / colors.length));
  return ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
}

/** The colours of every (kind, shade), and which kinds are hidden. */
export class Paint {
  constructor(palette, hidden) {
    this.palette = palette;
    this.hidden = hidden;
    this.fill = [];
    this.ink = [];
    for (const { fill, ink } of Object.values(palette.kinds)) {
      this.fill.push(fill);
      this.ink.push(ink);
    }
    this.words = this.fill.map((fill, kind) => (hidden.has(kind) ? 0 : wordOf(fill))); // of bands; 0 for hidden kinds
  }

  shown(kind) {
    return !this.hidden.has(kind);
  }
}

export function element(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in node && name !== "style") node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}
