// mountViewer: everything together.

import { decode } from "./data.js";
import { describe } from "./explain.js";
import { key, listen } from "./input.js";
import { buildBar } from "./legend.js";
import { Panel } from "./panel.js";
import { Paint, element, prepare } from "./shapes.js";
import { buildSummary } from "./summary.js";
import { ruler } from "./units.js";
import { View } from "./view.js";

const RULER = 30;
const NARROW = 600; // as in the style sheet

/**
 * Show `data` (what zeropipe.viz.payload gives) in `parent`.
 * Options: title, labels ("microbatch", "action", "none"), path, memory (whether shown at first), summary (default: when there
 * are several timelines), themeButton, keys (whether keys work before a timeline is focused). Returns { ready, update(data), recolour(), view, state, panels, destroy() };
 * `ready` resolves when painted. The theme is the data-theme of the html element ("light", "dark", else the system's):
 * call recolour() after changing it.
 */
export function mountViewer(parent, data, options = {}) {
  const viewer = new Viewer(parent, options);
  viewer.ready = viewer.update(data);
  return viewer;
}

class Viewer {
  constructor(parent, options) {
    this.options = options;
    this.panels = [];
    this.state = {
      view: new View(1), hidden: new Set(), labels: options.labels ?? "microbatch", path: options.path ?? false,
      memory: options.memory ?? true, found: null, gutter: 64, scale: 1, syncs: [], printing: false,
      themeButton: options.themeButton ?? true, scrolled: -Infinity,
    };
    this.view.listeners.add(() => this.repaint());
    this.bar = element("div");
    this.summary = element("div");
    this.ruler = element("canvas", { className: "zp-ruler", "aria-hidden": "true" });
    this.stack = element("div", { className: "zp-stack" });
    this.card = element("div", { className: "zp-card", hidden: true });
    this.voice = element("div", { className: "zp-voice", "aria-live": "polite" });
    const title = options.title ? [element("h1", { className: "zp-title" }, options.title)] : [];
    this.node = element("div", { className: "zp-viewer" }, ...title, this.bar, this.summary, this.ruler, this.stack, this.card, this.voice);
    parent.append(this.node);
    this.dark = matchMedia("(prefers-color-scheme: dark)");
    this.ending = new AbortController();
    const { signal } = this.ending;
    this.dark.addEventListener("change", () => this.recolour(), { signal });
    addEventListener("scroll", () => {
      this.state.scrolled = performance.now();
      this.repaint();
    }, { signal, passive: true });
    addEventListener("resize", () => this.repaint(), { signal }); // a taller window shows more panels
    if (options.keys) addEventListener("keydown", (event) => this.pageKey(event), { signal });
    addEventListener("beforeprint", () => this.print(true), { signal });
    addEventListener("afterprint", () => this.print(false), { signal });
    this.sizes = new ResizeObserver(() => this.resize());
    this.sizes.observe(this.node);
  }

  get view() {
    return this.state.view;
  }

  /** Other data in the same place: keeps switches and, while the timelines are as long, the zoom. */
  async update(data) {
    const turn = (this.turn = (this.turn ?? 0) + 1);
    const timelines = await decode(data);
    if (turn !== this.turn) return; // a newer update overtook this one
    this.state.data = data;
    this.state.found = null;
    this.state.syncs = [];
    this.card.hidden = true;
    const whole = Math.max(0, ...timelines.map((t) => t.makespan));
    if (whole !== this.view.whole) this.view.reset(whole);
    this.state.allRanks = timelines.reduce((sum, timeline) => sum + timeline.ranks, 0);
    this.panels = timelines.map((timeline) => new Panel(timeline, this.state));
    this.stack.replaceChildren(...this.panels.map((panel) => panel.node));
    for (const panel of this.panels) listen(panel, this.state, this.actions);
    this.bar.replaceChildren(buildBar(this.state, timelines, this.actions));
    const several = this.options.summary ?? timelines.length > 1;
    this.summary.replaceChildren(...(several ? [buildSummary(timelines, data.causes, (n) => this.goTo(n))] : []));
    this.recolour();
    this.resize();
    this.paint();
    this.node.dataset.painted = String(turn);
  }

  actions = {
    fit: () => this.view.fit(),
    zoom: (factor) => this.view.zoom(factor),
    recolour: () => this.recolour(),
    theme: () => {
      document.documentElement.dataset.theme = this.theme === "dark" ? "light" : "dark";
      this.recolour();
    },
    toggle: (name) => {
      this.state[name] = !this.state[name];
      for (const sync of this.state.syncs) sync();
      this.repaint();
    },
    help: () => this.bar.querySelector("dialog").showModal(),
    hover: (found, event) => this.hover(found, event),
    mark: (panel, box) => this.mark(panel, box),
  };

  get theme() {
    const chosen = document.documentElement.dataset.theme;
    return chosen === "dark" || chosen === "light" ? chosen : this.dark.matches ? "dark" : "light";
  }

  recolour() {
    if (!this.state.data) return;
    const theme = this.state.printing ? "light" : this.theme;
    const palette = this.state.data.palette[theme];
    this.state.paint = new Paint(palette, this.state.hidden);
    this.node.dataset.theme = theme;
    for (const name of ["paper", "lane", "ink", "soft", "line", "limit", "memory", "path", ...Object.keys(this.state.data.lane)]) {
      this.node.style.setProperty(`--zp-${name}`, palette[name]);
    }
    for (const [kind, { fill }] of Object.entries(palette.kinds)) {
      const stripes = fill.map((color, n) => `${color} ${(100 * n) / fill.length}% ${(100 * (n + 1)) / fill.length}%`);
      this.node.style.setProperty(`--zp-${kind}`, `linear-gradient(90deg, ${stripes.join(", ")})`);
      this.node.style.setProperty(`--zp-flat-${kind}`, fill[fill.length >> 1]);
    }
    this.repaint();
  }

  resize() {
    const width = this.stack.clientWidth;
    if (!width) return;
    this.state.gutter = width < NARROW ? 28 : 64;
    this.state.scale = this.state.printing ? 3 : devicePixelRatio || 1;
    this.view.width = width - this.state.gutter;
    this.repaint();
  }

  /** Paint before the next frame, once, however often asked. */
  repaint() {
    if (this.waiting || !this.state.paint) return;
    this.waiting = requestAnimationFrame(() => this.paint());
  }

  paint() {
    cancelAnimationFrame(this.waiting);
    this.waiting = 0;
    this.paintRuler();
    for (const panel of this.panels) panel.paint();
  }

  paintRuler() {
    const { view, gutter, scale, paint } = this.state;
    const context = prepare(this.ruler, gutter + view.width, RULER, scale);
    const { ticks, unit } = ruler(view.from, view.to, Math.max(2, view.width / 90), this.panels[0]?.timeline.unit ?? "");
    context.font = "11px system-ui, sans-serif";
    context.fillStyle = paint.palette.soft;
    context.textBaseline = "middle";
    context.textAlign = "right"; // left of the first number, which is centred on its tick
    const first = ticks.length ? view.x(ticks[0].at) - context.measureText(ticks[0].text).width / 2 - 4 : 0;
    context.fillText(unit || (gutter > 50 ? "time" : "t"), gutter + Math.min(-8, first), 14);
    context.textAlign = "center";
    for (const { at, text } of ticks) {
      const x = gutter + view.x(at);
      const half = context.measureText(text).width / 2;
      context.fillText(text, Math.max(gutter, Math.min(x, gutter + view.width - half)), 14);
      context.fillRect(Math.round(x), 23, 1, RULER - 23);
    }
    if (view.fitted) return;
    context.fillStyle = paint.palette.line; // where the window stands in the whole
    context.fillRect(gutter, 0, view.width, 3);
    context.fillStyle = paint.palette.memory;
    context.fillRect(gutter + (view.from / view.whole) * view.width, 0, Math.max(4, (view.span / view.whole) * view.width), 3);
  }

  hover(found, event) {
    const old = this.state.found;
    this.state.found = found;
    if (old?.panel !== found?.panel) old?.panel.paintLayer();
    found?.panel.paintLayer();
    this.card.hidden = !found;
    if (found) this.showCard(found, event.clientX, event.clientY);
  }

  /** Mark a box by key: bring it into sight, show its card beside it, say it. */
  mark(panel, box) {
    const { timeline, layout, plot } = panel;
    this.view.reveal(timeline.start[box], timeline.end[box]);
    this.paint();
    const place = plot.getBoundingClientRect();
    const x = place.left + this.state.gutter + Math.max(0, Math.min(this.view.width, this.view.x(timeline.end[box])));
    this.hover({ panel, rank: timeline.rank[box], box }, { clientX: x, clientY: place.top + layout.top(timeline.rank[box]) + layout.height });
    this.voice.textContent = this.card.innerText.replace(/\s+/g, " ");
  }

  showCard(found, x, y) {
    const { title, box, lines, look } = describe(found.panel.timeline, found, this.state.data);
    const { timeline } = found.panel;
    const chip = element("span", { className: "zp-swatch" });
    if (box >= 0) chip.style.background = this.state.paint.fill[timeline.kind[box]][timeline.shade[box]];
    else chip.classList.add(look ? `zp-${look}` : "zp-idle");
    const list = element("dl", {}, ...lines.flatMap(([label, text]) => [element("dt", {}, label), element("dd", {}, text)]));
    this.card.replaceChildren(element("strong", {}, chip, title), list);
    if (innerWidth < NARROW) return; // there it stands at the bottom, by the style sheet
    const { offsetWidth: w, offsetHeight: h } = this.card;
    const left = x + 16 + w > innerWidth ? x - w - 12 : x + 16;
    const top = y + 18 + h > innerHeight ? y - h - 12 : y + 18;
    this.card.style.left = `${Math.max(6, Math.min(left, innerWidth - w - 6))}px`;
    this.card.style.top = `${Math.max(6, top)}px`;
  }

  goTo(n) {
    this.panels[n].node.scrollIntoView({ behavior: "smooth", block: "start" });
    this.panels[n].plot.focus({ preventScroll: true });
  }

  /** A key while nothing has the focus is for the first timeline in sight. */
  pageKey(event) {
    if (document.activeElement && document.activeElement !== document.body) return;
    const panel = this.panels.find(({ plot }) => plot.getBoundingClientRect().bottom > 0);
    if (!panel || !["+", "=", "-", "0", "w", "s", "a", "d", "c", "m", "?", "ArrowLeft", "ArrowRight"].includes(event.key)) return;
    panel.plot.focus({ preventScroll: true });
    key(event, panel, this.state, this.actions);
  }

  /** On paper: light, sharp, all panels. */
  print(printing) {
    this.state.printing = printing;
    this.recolour();
    this.resize();
    this.paint();
  }

  destroy() {
    this.ending.abort();
    this.sizes.disconnect();
    this.node.remove();
  }
}
