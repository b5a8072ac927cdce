"""A figure for paper: timelines laid out in points (1/72 inch)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from math import ceil

import numpy as np
from numpy.typing import NDArray

from zeropipe.core.timeline import Timeline
from zeropipe.core.units import percent, size_text, time_text
from zeropipe.viz.axis import axis_unit, ticks
from zeropipe.viz.bands import SEAM, THINNEST, Region, bands, regions
from zeropipe.viz.boxes import Boxes, boxes, kinds_with_room
from zeropipe.viz.colors import LANE_WORDS, NAMES, ink_on, lane_color, shades
from zeropipe.viz.columns import LOWER, WHOLE
from zeropipe.viz.density import KINDS
from zeropipe.viz.drawable import drawable
from zeropipe.viz.lanes import has_lane, looks_of, merged, tracks
from zeropipe.viz.scene import Area, Line, Rect, Scene, Text
from zeropipe.viz.style import Style
from zeropipe.viz.words import cut_to, one_line, width_of, wrapped

FONT = 8.0
SMALL = 7.0
LEAST = 5.0  # the smallest font size
GLYPH = 0.6  # width of a digit, as a share of the font size
FILLED = 0.85  # part of a box that its label may fill
GAP_FROM = 4.0  # points: wider boxes have a gap on their right
LANE = 3.4  # points below a rank's boxes, for its gathers and reductions
TALLEST = 14_000.0  # points: PDF readers support at most 14,400
MARGIN = 6.0  # on the right
NAME = 60.0  # points: if a timeline's name has less beside its figures, these are below it
NO_BREAK = "\u00a0"
FINE_NOTE = "Boxes too fine to draw one by one: heights are shares of time."


def figure(timelines: Sequence[Timeline], style: Style) -> Scene:
    """Some timelines on one time axis."""
    out = Scene(style.width, 0.0, style.colors["paper"])
    timelines = [drawable(t) for t in timelines]
    models = [boxes(t) for t in timelines]
    left = _gutter(max(model.num_ranks for model in models), style)
    longest = max(model.makespan for model in models) or 1.0
    scale = (style.width - left - MARGIN) / longest
    rows = [[regions(model, rank, scale) for rank in range(model.num_ranks)] for model in models]
    y = 4.0
    if style.title:
        text = cut_to(one_line(style.title), FONT + 3, style.width - left - MARGIN, bold=True)
        out.items.append(Text(left, y + FONT + 2, text, FONT + 3, style.colors["ink"], bold=True))
        y += FONT + 9
    if style.legend:
        y = _legend(out, models, rows, style, left, y, looks_of(timelines))
    tallest = TALLEST / sum(model.num_ranks for model in models)
    for timeline, model, found in zip(timelines, models, rows, strict=True):
        y = _timeline(out, timeline, model, found, style, left, scale, y, tallest)
    y = _axis(out, timelines[0].unit, longest, style, left, scale, y)
    if any(region.fine for region in _all(rows)):
        note = FINE_NOTE if style.is_wide else FINE_NOTE.partition(":")[2].strip().capitalize()
        y = _say(out, note, style, left, y + SMALL + 2) - SMALL
    out.height = y + 4.0
    return out


def _say(out: Scene, text: str, style: Style, left: float, y: float) -> float:
    """Add a small text, wrapped, with its first base line at `y`; returns the base line of a next line."""
    for line in wrapped(text, SMALL, style.width - left - MARGIN):
        out.items.append(Text(left, y, line.replace(NO_BREAK, " "), SMALL, style.colors["soft"]))
        y += SMALL + 2
    return y


def _gutter(num_ranks: int, style: Style) -> float:
    """The width of the rank names on the left."""
    digits = len(str(num_ranks - 1))
    return 22.0 + 6.0 * max(2, digits) if style.is_wide else 6.0 + 4.0 * max(2, digits)


def _all(rows: list[list[list[Region]]]) -> Iterator[Region]:
    """Every region of every rank of every timeline."""
    return chain.from_iterable(chain.from_iterable(rows))


def _legend(
    out: Scene, models: Sequence[Boxes], rows: list[list[list[Region]]], style: Style, left: float, y: float,
    looks: Sequence[str],
) -> float:  # fmt: skip
    count = 1 if all(region.fine for region in _all(rows)) else max(model.num_shades for model in models)
    used = sorted({int(k) for model in models for k in np.unique(model.kind)})
    overlap = any(model.half[region.places].any() for model, found in zip(models, rows, strict=True)
                  for region in chain.from_iterable(found) if not region.fine)  # fmt: skip
    ink = style.colors["ink"]
    keys: list[tuple[str, list[Rect]]] = []  # a text, and the boxes before it, from 0, 0
    for kind in (KINDS[k] for k in used):
        text = f"{kind} {NAMES[kind]}" if style.is_wide else kind
        colors = enumerate(shades(kind, count))
        keys.append((text, [Rect(n * 12 / count, 1, 12 / count, FONT - 1, color) for n, color in colors]))
    if overlap:
        half = (FONT - 1) / 2
        halves = [Rect(0, 1 + n * half, 12, half, shades(kind, 1)[0]) for n, kind in enumerate("FB")]
        keys.append(("F and B overlapped" if style.is_wide else "F&B", halves))
    if style.labels != "none" and any(model.checkpointed for model in models):
        keys.append(("c checkpointed" if style.is_wide else "c", []))
    for look in looks:
        words = LANE_WORDS[look]
        text = words if style.is_wide else words.split()[0]
        keys.append((text, [Rect(0, FONT / 2 - LANE / 2 + 0.5, 12, LANE - 0.8, lane_color(style.theme, look))]))
    x = left
    for text, rects in keys:
        if x > left and x + 15 + width_of(text, FONT) > style.width - MARGIN:
            x, y = left, y + FONT + 4
        out.items += [rect._replace(x=x + rect.x, y=y + rect.y) for rect in rects]
        out.items.append(Text(x + 15, y + FONT - 1, text, FONT, ink))
        x += 15 + width_of(text, FONT) + 10
    return y + FONT + 7


def _timeline(
    out: Scene, timeline: Timeline, model: Boxes, rows: list[list[Region]], style: Style, left: float, scale: float,
    y: float, tallest: float,
) -> float:  # fmt: skip
    colors, right = style.colors, style.width - MARGIN
    facts = [f"makespan {time_text(timeline.makespan, timeline.unit)}", f"idle {percent(timeline.idle_fraction)}"]
    if timeline.memory and style.is_wide:
        facts.append(f"peak memory {size_text(max(timeline.peak_memory), timeline.memory_unit)}")
    facts = facts if style.facts else []
    line, size = ", ".join(facts), FONT if style.is_wide else SMALL
    beside = right - left - width_of(line, size) - 8
    is_narrow = bool(facts) and beside < min(NAME, width_of(timeline.title, FONT + 1, bold=True))
    title = cut_to(timeline.title, FONT + 1, right - left if is_narrow else beside, bold=True)
    out.items.append(Text(left, y + FONT, title, FONT + 1, colors["ink"], bold=True))
    if is_narrow:
        pieces = ", ".join(fact.replace(" ", NO_BREAK) for fact in facts)
        y = _say(out, pieces, style, left, y + 2 * FONT + 3) - FONT - SMALL - 2
    elif facts:
        out.items.append(Text(right, y + FONT, line, size, colors["soft"], "end"))
    y += FONT + 6
    roomy = 19.0 if model.half.any() else 15.0  # two labels in one box need space
    below = LANE if has_lane(timeline) else 0.0
    pitch = min(tallest, below + (roomy if model.num_ranks <= 16 else 9.0 if model.num_ranks <= 64 else 5.0))
    below = below if pitch > 2 * below else 0.0
    height = (pitch - below) * 0.86 if pitch > 2 else pitch
    labels = _label_sizes(model, height, style, scale)
    areas: list[Area] = []
    rects: list[Rect] = []
    texts: list[Text] = []
    for rank in range(model.num_ranks):
        top = y + rank * pitch
        out.items.append(Rect(left, top, model.makespan * scale, height, colors["lane"]))
        texts += _rank_name(rank, top + height / 2, pitch, style, left)
        if below:
            rects += _lane(timeline, rank, left, top + height + 0.5, style, scale)
        for places, fine in rows[rank]:
            if fine:
                areas += bands(model, places, left, top, height, scale)
            else:
                _add_row(model, places, left, top, height, style, scale, labels, rects, texts)
    texts.sort(key=lambda text: (text.fill, text.size, text.anchor))
    out.items += [*areas, *rects, *texts]  # grouped by type: faster to draw, and a smaller file
    y += model.num_ranks * pitch + 4
    return _memory(out, timeline, model, style, left, scale, y) if style.memory and timeline.memory else y + 4


def _lane(timeline: Timeline, rank: int, left: float, top: float, style: Style, scale: float) -> Iterator[Rect]:
    """The gathers and reductions of a rank, and its copies, below its boxes."""
    listed = tracks(timeline, rank)
    pitch = (LANE - 0.8) / len(listed)
    for number, track in enumerate(listed):
        for move in merged(track, THINNEST / scale):
            x, width = left + move.start * scale, (move.end - move.start) * scale
            width = max(THINNEST, width - _gap(width))
            yield Rect(x, top + number * pitch, width, pitch, lane_color(style.theme, move.look), move.name)


def _rank_name(rank: int, middle: float, pitch: float, style: Style, left: float) -> list[Text]:
    """The name beside a row; of narrow rows, only some have one."""
    size = SMALL if pitch >= 9 else LEAST
    every = ceil(1.1 * size / pitch)
    if rank % (every if every <= 2 else ceil(every / 4) * 4):
        return []
    text = f"rank {rank}" if style.is_wide else str(rank)
    return [Text(left - 4, middle + size * 0.36, text, size, style.colors["soft"], "end")]


Labels = dict[tuple[int, bool], float]


def _label_sizes(model: Boxes, height: float, style: Style, scale: float) -> Labels:
    """(kind, is it half of an Overlap) -> font size, for those whose longest label fits."""
    if style.labels == "none" or not len(model.start):
        return {}
    longest = model.longest_label + (len(f"{model.stage.max()}F") if style.labels == "action" else 0)
    per_size = GLYPH * longest / FILLED  # points of width per point of font
    sizes: Labels = {}
    for kind, half in kinds_with_room(model, (LEAST * per_size + _gap(LEAST * per_size)) / scale):
        alike = (model.kind == kind) & ((model.half != WHOLE) == half)
        narrow = float(np.quantile(model.end[alike] - model.start[alike], 0.1)) * scale
        size = min(FONT, (height / 2 - 0.3 if half else height) * FILLED, (narrow - _gap(narrow)) / per_size)
        if size >= LEAST * (1 - 1e-9):
            sizes[kind, half] = size
    return sizes


def _label(model: Boxes, i: int, labels: str) -> str:
    return model.label(i) if labels == "microbatch" else _name(model, i)


def _name(model: Boxes, i: int) -> str:
    return f"{model.stage[i]}{KINDS[int(model.kind[i])]}{model.label(i)}"


def _gap(width: float) -> float:
    """The gap to the right of a box of that width."""
    return 0.6 if width > GAP_FROM else 0.0


def _hairline(width: float, color: str, following: str) -> float:
    """The gap between two narrower boxes: positive if they look the same, so that they do not look like one box."""
    return 0.3 if 2.0 < width <= GAP_FROM and color == following else -SEAM


def _add_row(
    model: Boxes, places: slice, x: float, top: float, height: float, style: Style, scale: float, labels: Labels,
    rects: list[Rect], texts: list[Text],
) -> None:  # fmt: skip
    """The boxes at `places`, neighbours on one rank, and their labels."""
    looks = zip(model.kind[places], model.shade[places], strict=True)
    fills = [shades(KINDS[kind], model.num_shades)[shade] for kind, shade in looks]
    for i in range(places.start, places.stop):
        half, kind = int(model.half[i]), int(model.kind[i])
        color = fills[i - places.start]
        left = x + float(model.start[i]) * scale
        w = float(model.end[i] - model.start[i]) * scale
        w = max(THINNEST, w - _gap(w))
        h = height if half == WHOLE else height / 2 - 0.3
        y = top + (height / 2 + 0.3 if half == LOWER else 0.0)
        after = i + (1 if half == WHOLE else 2)  # the box of the same half, or a whole one
        if w <= GAP_FROM and after < places.stop and (model.start[after] - model.end[i]) * scale < 0.01:
            w = max(THINNEST, w - _hairline(w, color, fills[after - places.start]))
        rects.append(Rect(left, y, w, h, color, _name(model, i)))
        size = labels.get((kind, half != WHOLE), 0.0)
        text = _label(model, i, style.labels) if size else ""
        if text and w >= GLYPH * len(text) * size * (1 - 1e-9):
            texts.append(Text(left + w / 2, y + h / 2 + size * 0.36, text, size, ink_on(color), "middle"))


def _memory(out: Scene, timeline: Timeline, model: Boxes, style: Style, left: float, scale: float, y: float) -> float:
    assert timeline.memory is not None
    during, after = (np.frombuffer(column, np.float64) for column in timeline.memory)
    limit = timeline.memory_limit
    top = max(*timeline.peak_memory, limit or 0.0) or 1.0
    pitch = min(13.0, TALLEST / 2 / model.num_ranks)
    says = f"memory, a full row is {size_text(top, timeline.memory_unit)}"
    if limit is not None:
        says += f", dashed the limit {size_text(limit, timeline.memory_unit)}"
    y = _say(out, says, style, left, y + SMALL - 1) - SMALL + 2
    right = left + model.makespan * scale
    for rank in range(model.num_ranks):
        begin, stop = int(model.offsets[rank]), int(model.offsets[rank + 1])
        base = y + rank * pitch + pitch * 0.86
        high = pitch * 0.86 / top
        out.items.append(Rect(left, y + rank * pitch, right - left, pitch * 0.86, style.colors["lane"]))
        out.items += _rank_name(rank, base - pitch * 0.43, pitch, style, left)
        if stop > begin:
            curve = _curve(model, during, after, begin, stop, scale)
            points = tuple((left + x, base - level * high) for x, level in curve)
            out.items.append(Area(points, style.colors["memory"], 0.6))
        if limit is not None:
            level = base - limit * high
            out.items.append(Line(((left, level), (right, level)), style.colors["limit"], 0.6, True))
    return y + model.num_ranks * pitch + 6


def _curve(
    model: Boxes, during: NDArray[np.float64], after: NDArray[np.float64], begin: int, stop: int, scale: float
) -> list[tuple[float, float]]:
    """The corners of a rank's memory level; of the levels within `THINNEST` points the highest."""
    left, right = model.start[begin:stop] * scale, model.end[begin:stop] * scale
    cell = np.floor(left / THINNEST)
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


def _axis(out: Scene, unit: str, longest: float, style: Style, left: float, scale: float, y: float) -> float:
    colors = style.colors
    factor, name = axis_unit(longest, unit)
    right = left + longest * scale
    name = cut_to(f"time ({name})" if name else "time", SMALL, 80)
    out.items.append(Line(((left, y), (right, y)), colors["soft"], 0.6))
    for time, text in ticks(longest, factor, max(2, int((style.width - left) / 48))):
        x = left + time * scale
        out.items.append(Line(((x, y), (x, y + 3)), colors["soft"], 0.6))
        half = width_of(text, SMALL) / 2
        if x + half < right - width_of(name, SMALL) - 2:
            inside = min(x, style.width - half)
            out.items.append(Text(inside, y + 4 + SMALL, text, SMALL, colors["soft"], "middle"))
    out.items.append(Text(right, y + 4 + SMALL, name, SMALL, colors["soft"], "end"))
    return y + SMALL + 6
