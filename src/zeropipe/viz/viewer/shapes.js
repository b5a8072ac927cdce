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

export function rgbOf(color) {
  return [1, 3, 5].map((i) => parseInt(color.slice(i, i + 2), 16));
}

/** The colours of every (kind, shade), with those of hidden kinds faded into the lane. */
export class Paint {
  constructor(palette, hidden) {
    this.palette = palette;
    this.hidden = hidden;
    this.fill = [];
    this.ink = [];
    this.rgb = [];
    for (const { fill, ink } of Object.values(palette.kinds)) {
      this.fill.push(fill);
      this.ink.push(ink);
      this.rgb.push(fill.map(rgbOf));
    }
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
