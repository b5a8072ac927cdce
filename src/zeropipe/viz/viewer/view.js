// The window on time that all panels share.

const CLOSEST = 1e-7; // of the whole: no zoom beyond this

export class View {
  constructor(whole) {
    this.listeners = new Set();
    this.width = 1;
    this.reset(whole);
  }

  reset(whole) {
    this.whole = whole > 0 ? whole : 1;
    this.from = 0;
    this.to = this.whole;
  }

  get span() {
    return this.to - this.from;
  }

  get fitted() {
    return this.from <= 0 && this.to >= this.whole;
  }

  /** Pixels of a time, and back; `width` is the drawing area's. */
  x(time) {
    return ((time - this.from) / (this.to - this.from)) * this.width;
  }

  time(x) {
    return this.from + (x / this.width) * (this.to - this.from);
  }

  zoom(factor, x = this.width / 2) {
    const center = this.time(x);
    const span = Math.min(this.whole, Math.max(this.whole * CLOSEST, this.span / factor));
    this.show(center - (x / this.width) * span, span);
  }

  pan(pixels) {
    this.show(this.from + (pixels / this.width) * this.span, this.span);
  }

  fit() {
    this.show(0, this.whole);
  }

  /** Bring [start, end] into sight without changing the zoom. */
  reveal(start, end) {
    if (start < this.from || end > this.to) this.show((start + end) / 2 - this.span / 2, this.span);
  }

  show(from, span) {
    this.from = Math.max(0, Math.min(from, this.whole - span));
    this.to = this.from + span;
    for (const listener of this.listeners) listener();
  }
}
