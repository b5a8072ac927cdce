"""A figure for paper: timelines laid out in points (1/72 inch) as rectangles, lines, areas and text.

`svg.py` and `raster.py` only write down what is laid out here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zeropipe.core.timeline import Timeline
from zeropipe.core.units import number, percent, size_text, tick_step, time_text
from zeropipe.viz.boxes import LOWER, WHOLE, Boxes, boxes
from zeropipe.viz.colors import NAMES, ink_on, shades
from zeropipe.viz.style import Style

FONT = 8.0
SMALL = 7.0
LEAST = 5.0  # no text smaller than this
GLYPH = 0.6  # width of a digit, as a share of the font size
FINEST = 0.25  # points: narrower boxes share one


class Rect(NamedTuple):
    x: float
    y: float
    w: float
    h: float
    fill: str
    title: str = ""


class Text(NamedTuple):
    x: float
    y: float  # the base line
    text: str
    size: float
    fill: str
    anchor: str = "start"  # or "middle", "end"
    bold: bool = False


class Line(NamedTuple):
    points: tuple[tuple[float, float], ...]
    color: str
    width: float
    dashed: bool = False


class Area(NamedTuple):
    points: tuple[tuple[float, float], ...]
    fill: str


Item = Rect | Text | Line | Area


@dataclass
class Scene:
    """What to draw, back to front."""

    width: float
    height: float
    paper: str
    items: list[Item] = field(default_factory=list)


def gutter_of(style: Style) -> float:
    """The room for rank names on the left."""
    return 34.0 if style.is_wide else 14.0


def scene(timelines: Sequence[Timeline], style: Style) -> Scene:
    """The figure of some timelines on one time axis."""
    out = Scene(style.width, 0.0, style.colors["paper"])
    models = [boxes(t) for t in timelines]
    longest = max(model.makespan for model in models) or 1.0
    scale = (style.width - gutter_of(style) - 6.0) / longest
    y = 4.0
    if style.title:
        out.items.append(Text(gutter_of(style), y + FONT + 2, style.title, FONT + 3, style.colors["ink"], bold=True))
        y += FONT + 9
    if style.legend:
        y = _legend(out, models, style, y)
    for timeline, model in zip(timelines, models, strict=True):
        y = _timeline(out, timeline, model, style, scale, y)
    y = _axis(out, timelines[0].unit, longest, style, scale, y)
    out.height = y + 4.0
    return out


def _legend(out: Scene, models: Sequence[Boxes], style: Style, y: float) -> float:
    count = max(model.num_shades for model in models)
    used = sorted({int(k) for model in models for k in np.unique(model.kind)})
    overlap = any(model.half.any() for model in models)
    long = style.is_wide
    x = gutter_of(style)
    for kind in ("FBIW"[k] for k in used):
        for n, color in enumerate(shades(kind, count)):
            out.items.append(Rect(x + n * 12 / count, y + 1, 12 / count, FONT - 1, color))
        text = f"{kind} {NAMES[kind]}" if long else kind
        out.items.append(Text(x + 15, y + FONT - 1, text, FONT, style.colors["ink"]))
        x += 15 + FONT * 0.5 * len(text) + 10
    if overlap:
        out.items.append(Rect(x, y + 1, 12, (FONT - 1) / 2, shades("F", 1)[0]))
        out.items.append(Rect(x, y + 1 + (FONT - 1) / 2, 12, (FONT - 1) / 2, shades("B", 1)[0]))
        out.items.append(Text(x + 15, y + FONT - 1, "F and B overlapped" if long else "F&B", FONT, style.colors["ink"]))
    return y + FONT + 7


def _timeline(out: Scene, timeline: Timeline, model: Boxes, style: Style, scale: float, y: float) -> float:
    colors, right = style.colors, style.width - 6.0
    facts = f"makespan {time_text(timeline.makespan, timeline.unit)}, bubble {percent(timeline.bubble)}"
    if timeline.memory and style.is_wide:
        facts += f", peak memory {size_text(max(timeline.peak_memory), timeline.memory_unit)}"
    out.items.append(Text(gutter_of(style), y + FONT, timeline.title, FONT + 1, colors["ink"], bold=True))
    out.items.append(Text(right, y + FONT, facts, FONT if style.is_wide else SMALL, colors["soft"], "end"))
    y += FONT + 6
    split = 19.0 if model.half.any() else 15.0  # two labels in one box need room
    pitch = split if model.num_ranks <= 16 else 9.0 if model.num_ranks <= 64 else 5.0
    height = pitch * 0.86
    for rank in range(model.num_ranks):
        top = y + rank * pitch
        out.items.append(Rect(gutter_of(style), top, model.makespan * scale, height, colors["lane"]))
        _rank_name(out, rank, top + height / 2, pitch, style)
        out.items.extend(_row(model, rank, top, height, style, scale))
    y += model.num_ranks * pitch + 4
    return _memory(out, timeline, model, style, scale, y) if style.memory and timeline.memory else y + 4


def _rank_name(out: Scene, rank: int, middle: float, pitch: float, style: Style) -> None:
    if pitch < SMALL and rank % 4:
        return
    text = f"rank {rank}" if gutter_of(style) > 20 else str(rank)
    size = SMALL if pitch >= 9 else LEAST
    out.items.append(Text(gutter_of(style) - 4, middle + size * 0.36, text, size, style.colors["soft"], "end"))


def _row(model: Boxes, rank: int, top: float, height: float, style: Style, scale: float) -> list[Item]:
    begin, stop = int(model.offsets[rank]), int(model.offsets[rank + 1])
    left = gutter_of(style) + model.start[begin:stop] * scale
    width = (model.end[begin:stop] - model.start[begin:stop]) * scale
    rects: list[Rect] = []
    texts: list[Text] = []
    for at in kept(left, width):
        i = begin + int(at)
        half, kind = int(model.half[i]), "FBIW"[int(model.kind[i])]
        color = shades(kind, model.num_shades)[int(model.shade[i])]
        w = float(width[at])
        w = max(FINEST, w - (0.6 if w > 3 else 0.3 if w > 1 else 0.0))
        h = height if half == WHOLE else height / 2 - 0.3
        y = top + (height / 2 + 0.3 if half == LOWER else 0.0)
        name = f"{model.stage[i]}{kind}{model.microbatch[i]}"
        rects.append(Rect(float(left[at]), y, w, h, color, name))
        text = {"microbatch": str(model.microbatch[i]), "action": name, "none": ""}[style.labels]
        size = min(FONT, h * 0.85, w * 0.85 / (GLYPH * len(text))) if text else 0.0
        if size >= LEAST:
            texts.append(Text(float(left[at]) + w / 2, y + h / 2 + size * 0.36, text, size, ink_on(color), "middle"))
    return [*rects, *sorted(texts, key=lambda text: (text.fill, text.size))]  # alike side by side: a smaller file


def kept(left: NDArray[np.float64], width: NDArray[np.float64]) -> NDArray[np.int64]:
    """Which boxes to draw: all, but of those finer than `FINEST` only the first in each cell of that size."""
    fine = width < FINEST
    if not fine.any():
        return np.arange(len(left))
    cell = np.floor(left / FINEST).astype(np.int64)
    first = np.ones(len(left), bool)
    first[1:] = cell[1:] != cell[:-1]
    return np.flatnonzero(~fine | first)


def _memory(out: Scene, timeline: Timeline, model: Boxes, style: Style, scale: float, y: float) -> float:
    assert timeline.memory is not None
    during, after = (np.frombuffer(column, np.float64) for column in timeline.memory)
    limit = timeline.memory_limit
    top = max(*timeline.peak_memory, limit or 0.0) or 1.0
    pitch = 13.0
    for rank in range(model.num_ranks):
        begin, stop = int(model.offsets[rank]), int(model.offsets[rank + 1])
        base = y + rank * pitch + pitch * 0.86
        high = pitch * 0.8 / top
        out.items.append(
            Rect(gutter_of(style), y + rank * pitch, model.makespan * scale, pitch * 0.86, style.colors["lane"])
        )
        _rank_name(out, rank, base - pitch * 0.43, pitch, style)
        if stop > begin:
            curve = _curve(model, during, after, begin, stop, scale)
            points = ((gutter_of(style) + x, base - level * high) for x, level in curve)
            out.items.append(Area(tuple(points), style.colors["memory"]))
        if limit is not None:
            x0, x1 = gutter_of(style), gutter_of(style) + model.makespan * scale
            out.items.append(
                Line(((x0, base - limit * high), (x1, base - limit * high)), style.colors["limit"], 0.6, True)
            )
    return y + model.num_ranks * pitch + 6


def _curve(
    model: Boxes, during: NDArray[np.float64], after: NDArray[np.float64], begin: int, stop: int, scale: float
) -> list[tuple[float, float]]:
    """The corners of a rank's memory level; of the levels within `FINEST` points the highest."""
    left, right = model.start[begin:stop] * scale, model.end[begin:stop] * scale
    cell = np.floor(left / FINEST)
    first = np.flatnonzero(np.concatenate([[True], cell[1:] != cell[:-1]]))
    last = np.append(first[1:], len(left)) - 1
    tops = np.maximum.reduceat(during[begin:stop], first)
    corners = [(float(left[0]), 0.0)]
    for at, until, top in zip(first, last, tops, strict=True):
        for x, level in ((left[at], top), (right[until], after[begin + until])):
            if level != corners[-1][1]:
                corners += [(float(x), corners[-1][1]), (float(x), float(level))]
    end = float(right[-1])
    return [*corners, (end, corners[-1][1]), (end, 0.0)]


def _axis(out: Scene, unit: str, longest: float, style: Style, scale: float, y: float) -> float:
    colors = style.colors
    factor, name = 1.0, unit
    if unit == "s":
        factor, name = next(((f, n) for f, n in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")) if longest >= f), (1e-9, "ns"))
    step = tick_step(longest / factor, max(2, int((style.width - gutter_of(style)) / 48)))
    right = gutter_of(style) + longest * scale
    out.items.append(Line(((gutter_of(style), y), (right, y)), colors["soft"], 0.6))
    for n in range(int(longest / factor / step + 1e-9) + 1):
        x = gutter_of(style) + n * step * factor * scale
        out.items.append(Line(((x, y), (x, y + 3)), colors["soft"], 0.6))
        if x < right - 24 or not name:
            out.items.append(Text(x, y + 4 + SMALL, number(n * step, 6), SMALL, colors["soft"], "middle"))
    if name:
        out.items.append(Text(right, y + 4 + SMALL, name, SMALL, colors["soft"], "end"))
    return y + SMALL + 6
