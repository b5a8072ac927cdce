"""How long pictures take: build, file size, first paint and pan steps of the offline page, beside Plotly shapes.

    python bench/draw.py                       # 1k to 1M boxes, of a simulated and a noisy run; Plotly at 1k and 10k
    python bench/draw.py --sizes 1000 100000 --json out.json

First paint is from the start of loading the file until the frame after the first painting, as the browser's own clock
has it. A pan step is one drag event with its repaint, until the next frame is done.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from playwright.sync_api import sync_playwright

import zeropipe as zp

RANKS = 16
ARGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
        "--disable-sync", "--no-first-run"]  # fmt: skip
WAIT_VIEWER = (
    "async () => { while (!document.querySelector('[data-painted]')) await new Promise(requestAnimationFrame); }"
)
WAIT_PLOTLY = "async () => { while (!window.done) await new Promise(requestAnimationFrame); }"
FRAME = "await new Promise((next) => requestAnimationFrame(() => setTimeout(next, 0)));"
PAINTED = f"async () => {{ {FRAME} return performance.now(); }}"
PAN = f"""async ([select, steps]) => {{
  const plot = document.querySelector(select);
  const box = plot.getBoundingClientRect();
  const at = (type, x) => plot.dispatchEvent(new PointerEvent(type, {{
    pointerId: 1, bubbles: true, clientX: box.left + x, clientY: box.top + 40, button: 0, buttons: 1 }}));
  plot.setPointerCapture = () => {{}};
  at("pointerdown", box.width / 2);
  const times = [];
  for (let n = 1; n <= steps; n++) {{
    const begin = performance.now();
    at("pointermove", box.width / 2 - 7 * n);
    {FRAME}
    times.push(performance.now() - begin);
  }}
  at("pointerup", box.width / 2);
  return times;
}}"""
ZOOM = """() => { const plot = document.querySelector(".zp-plot"); const box = plot.getBoundingClientRect();
  for (let n = 0; n < 5; n++) plot.dispatchEvent(new WheelEvent("wheel", {
    deltaY: -100, clientX: box.left + box.width / 2, clientY: box.top + 40, cancelable: true, bubbles: true })); }"""
WINDOW = "zeropipeViewer.view.from"
PAN_PLOTLY = f"""async (steps) => {{
  const times = [];
  const [from, to] = figure.layout.xaxis.range;
  for (let n = 1; n <= steps; n++) {{
    const begin = performance.now();
    const shift = (0.005 * n) * (to - from);
    await Plotly.relayout(figure, {{"xaxis.range": [from + shift, to + shift]}});
    {FRAME}
    times.push(performance.now() - begin);
  }}
  return times;
}}"""


def timeline(size: int, noisy: bool = False) -> zp.Timeline:
    """A ZBV run of about `size` boxes on 16 ranks. With noise, no two times repeat, as in a measured run."""
    schedule = zp.build("zbv", ranks=RANKS, microbatches=max(1, round(size / (RANKS * 2 * 3))))
    run = zp.simulate(schedule, zp.Costs(f=1.0, i=1.03, w=0.91, p2p=0.07))
    if not noisy:
        return run
    noise = np.random.default_rng(0).uniform(0, 0.02, (2, schedule.num_actions))
    start, end = np.frombuffer(run.start) + noise[0], np.frombuffer(run.end) - noise[1]
    return replace(run, start=start.tobytes(), end=end.tobytes(), measured=True)


def measure_viewer(page: Any, size: int, folder: Path, steps: int, noisy: bool = False) -> dict[str, Any]:
    run = timeline(size, noisy)
    path = folder / f"{size}{noisy}.html"
    begin = time.perf_counter()
    zp.draw(run, path)
    build = time.perf_counter() - begin
    page.goto(path.as_uri(), wait_until="commit")
    page.evaluate(WAIT_VIEWER)
    paint = page.evaluate(PAINTED)
    page.evaluate(ZOOM)
    page.evaluate(PAINTED)
    before = page.evaluate(WINDOW)
    times = page.evaluate(PAN, [".zp-plot", steps])
    assert page.evaluate(WINDOW) > before, "the drag did not move the picture"
    return row("zeropipe, noisy times" if noisy else "zeropipe", run.schedule.num_actions, build, path, paint, times)


def measure_noisy(page: Any, size: int, folder: Path, steps: int) -> dict[str, Any]:
    return measure_viewer(page, size, folder, steps, noisy=True)


def measure_plotly(page: Any, size: int, folder: Path, steps: int) -> dict[str, Any]:
    import plotly.graph_objects as go
    from plotly.io import write_html

    run = timeline(size)
    path = folder / f"plotly{size}.html"
    begin = time.perf_counter()
    colors = {"F": "#255ebc", "B": "#b63924", "I": "#e6bb50", "W": "#7fddba"}
    shapes = [
        {"type": "rect", "x0": s.start, "x1": s.end, "y0": rank - 0.43, "y1": rank + 0.43,
         "fillcolor": colors[s.action.kind.name], "line": {"width": 0}}
        for rank in range(RANKS)
        for s in run.spans(rank)
    ]  # fmt: skip
    figure = go.Figure(layout={"shapes": shapes, "width": 1400, "height": 600,
                               "xaxis": {"range": [0, run.makespan]}, "yaxis": {"range": [RANKS, -1]}})  # fmt: skip
    write_html(figure, path, include_plotlyjs=True, div_id="figure", post_script="window.done = true;")
    build = time.perf_counter() - begin
    page.goto(path.as_uri(), wait_until="commit")
    page.evaluate(WAIT_PLOTLY)
    paint = page.evaluate(PAINTED)
    return row("plotly shapes", run.schedule.num_actions, build, path, paint, page.evaluate(PAN_PLOTLY, steps))


def row(name: str, boxes: int, build: float, path: Path, paint: float, times: list[float]) -> dict[str, Any]:
    ordered = sorted(times)
    return {
        "tool": name, "boxes": boxes, "build_s": round(build, 3), "file_mb": round(path.stat().st_size / 1e6, 2),
        "first_paint_s": round(paint / 1000, 3), "pan_mean_ms": round(statistics.mean(times), 1),
        "pan_p95_ms": round(ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))], 1),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="*", default=[1_000, 10_000, 100_000, 1_000_000])
    parser.add_argument("--plotly", type=int, nargs="*", default=[1_000, 10_000])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    zp.draw(timeline(100), Path(tempfile.gettempdir()) / "zeropipe-warm.html")  # imports are no part of the build time
    rows = []
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as browsers:
        browser = browsers.chromium.launch(executable_path=args.chromium, args=ARGS)
        jobs = [(measure_viewer, size, args.steps) for size in args.sizes]
        jobs += [(measure_noisy, size, args.steps) for size in args.sizes]
        jobs += [(measure_plotly, size, 5) for size in args.plotly]
        for measure, size, steps in jobs:
            page = browser.new_page(viewport={"width": 1440, "height": 900})
            page.set_default_timeout(180_000)
            rows.append(measure(page, size, Path(folder), steps))
            page.close()
            print(rows[-1], flush=True)
        browser.close()
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
