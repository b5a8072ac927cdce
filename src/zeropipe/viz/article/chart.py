"""A chart of any width: lines as an SVG that is stretched, labels as text that keeps its size."""

from __future__ import annotations

import json
from html import escape
from itertools import pairwise
from math import ceil, floor, isfinite

from zeropipe.core.units import number, tick_step, time_text
from zeropipe.viz.article.blocks import Chart, Line

SIZE = 1000  # of the SVG's own coordinates, both ways
MAX_POINTS = 600  # of a line: more cannot be distinguished


def chart_html(chart: Chart) -> str:
    """One chart with its legend, and its numbers for the script that shows them."""
    lines = [Line(line.name, thinned(line.points), line.tone, line.look) for line in chart.lines]
    points = [point for line in lines for point in line.points]
    x_low, x_high = _range([x for x, _ in points])
    low, high, ticks = _y_axis([y for _, y in points], chart.from_zero)

    def place(x: float, y: float) -> tuple[float, float]:
        return SIZE * (x - x_low) / (x_high - x_low), SIZE * (high - y) / (high - low)

    grid = "".join(f'<path class="zp-grid" d="M0 {_at(place(x_low, tick)[1])}H{SIZE}"/>' for tick in ticks)
    drawn = "".join(_path(line, [place(*point) for point in line.points]) for line in lines)
    y_names = "".join(
        f'<span style="top:{100 * (high - tick) / (high - low):.2f}%">{escape(_text(tick, chart.unit))}</span>'
        for tick in ticks
    )
    keys = "".join(
        f'<span class="zp-key"><i class="zp-stroke zp-{line.look} zp-tone-{line.tone}"></i>{escape(line.name)}</span>'
        for line in lines
    )
    data = {
        "x": chart.x_name,
        "range": [x_low, x_high],
        "lines": [
            {"name": line.name, "points": [[x, y, _text(y, chart.unit)] for x, y in line.points]} for line in lines
        ],
    }
    summary = escape(_summary(chart))
    return (
        f'<figure class="zp-chart" data-chart="{escape(json.dumps(data, separators=(",", ":")))}">'
        f"<figcaption><h2>{escape(chart.title)}</h2><span>{keys}</span></figcaption>"
        f'<div class="zp-chart-body"><div class="zp-chart-y">{y_names}</div><div class="zp-chart-plot">'
        f'<svg viewBox="0 0 {SIZE} {SIZE}" preserveAspectRatio="none" role="img" aria-label="{summary}">'
        f"{grid}{drawn}</svg></div>"
        f'<div class="zp-chart-x">{_x_names(chart.x_name, x_low, x_high)}</div></div></figure>'
    )


def thinned(points: tuple[tuple[float, float], ...], most: int = MAX_POINTS) -> tuple[tuple[float, float], ...]:
    """At most `most` points: means of neighbours, and the last one as it is. What is no finite number is left out."""
    good = tuple(point for point in points if isfinite(point[0]) and isfinite(point[1]))
    if len(good) <= most:
        return good
    cuts = [n * len(good) // (most - 1) for n in range(most)]
    groups = [good[a:b] for a, b in pairwise(cuts)]
    return (*((sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups), good[-1])


def _path(line: Line, places: list[tuple[float, float]]) -> str:
    if not places:
        return ""
    steps = [f"{_at(x)} {_at(y)}" for x, y in places]
    tone = f"zp-tone-{line.tone}"
    alone = line.look == "points" or len(steps) == 1
    if alone:  # a line of no length has round ends
        return f'<path class="zp-line zp-dots {tone}" d="{"".join(f"M{step}h0" for step in steps)}"/>'
    return f'<path class="zp-line zp-{line.look} {tone}" d="M{"L".join(steps)}"/>'


def _x_names(name: str, low: float, high: float) -> str:
    step = max(1.0, tick_step(high - low, 6))
    first = ceil(low / step - 1e-9)
    ticks = [n * step for n in range(first, floor(high / step + 1e-9) + 1)]
    places = "".join(
        f'<span style="left:{100 * (tick - low) / (high - low):.2f}%">{number(tick)}</span>' for tick in ticks
    )
    return f"{places}<em>{escape(name)}</em>"


def _range(values: list[float]) -> tuple[float, float]:
    low, high = min(values, default=0.0), max(values, default=1.0)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _y_axis(values: list[float], from_zero: bool) -> tuple[float, float, list[float]]:
    """The lowest and the highest value of the axis, and round values between them."""
    low, high = _range(values)
    if from_zero:
        low, high = min(0.0, low), (high if max(values, default=1.0) > 0 else 1.0)
    step = tick_step(high - low, 5)
    low, high = step * floor(low / step + 1e-9), step * ceil(high / step - 1e-9)
    return low, high, [low + n * step for n in range(round((high - low) / step) + 1)]


def _at(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _text(value: float, unit: str) -> str:
    return time_text(value, unit) if abs(value) > 1e-12 else "0"


def _summary(chart: Chart) -> str:
    """The chart in words, for screen readers."""
    ends = [
        f"{line.name} from {_text(line.points[0][1], chart.unit)} to {_text(line.points[-1][1], chart.unit)}"
        for line in chart.lines
        if line.points
    ]
    return f"{chart.title}: {'; '.join(ends) or 'no points yet'}"
