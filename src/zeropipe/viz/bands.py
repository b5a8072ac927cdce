"""Bands in place of boxes that are too fine to draw one by one; the height of a band is a share of time.

Boxes finer than the resolution of a screen or printer would alias with its pixels and show stripes that do not exist
(moiré). There a row is drawn as stretches: long runs of one kind and long idle gaps stay sharp; between them, each
kind is a band as high as its share of the time around, and the idle share is empty above.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from zeropipe.viz.boxes import Boxes
from zeropipe.viz.colors import shades
from zeropipe.viz.columns import LOWER
from zeropipe.viz.density import KINDS, Floats, round_time, shares_around, times_of
from zeropipe.viz.scene import Area

FINE = 1.5  # points: where boxes are narrower than this on average, they are drawn as bands
AROUND = 6  # boxes on either side that count for this average
SHORTEST = 8.0  # points: shorter regions of fine boxes are drawn one by one
FEWEST = 2 * AROUND  # boxes: smaller regions are, too
SHARP_GAP = 1.5  # points: longer idle time is left empty
SHARP_RUN = 6.0  # points: a longer run of one kind is not blended with its neighbours
THINNEST = 0.25  # points: the width of a box without duration
CELL = 1.0  # points from one height to the next
SEAM = 0.4  # points by which an area extends below the next one
FLAT = 0.04  # points: a corner closer than this to a straight line is left out


class Region(NamedTuple):
    """Neighbours on one rank that are all drawn the same way."""

    places: slice
    fine: bool


class Stretch(NamedTuple):
    """A part of a row without long idle gaps; `pure` if it has one kind only."""

    places: slice
    left: float  # points
    right: float
    pure: bool


def regions(model: Boxes, rank: int, scale: float) -> list[Region]:
    """The row of a rank, first to last, with `scale` points per unit of time."""
    begin, stop = int(model.offsets[rank]), int(model.offsets[rank + 1])
    if begin == stop:
        return []
    left, right = model.start[begin:stop] * scale, model.end[begin:stop] * scale
    window = np.ones(2 * AROUND + 1)
    counts = np.convolve(np.ones(stop - begin), window)[AROUND:-AROUND]
    fine = np.convolve(right - left, window)[AROUND:-AROUND] / counts < FINE
    lower = np.flatnonzero(model.half[begin:stop] == LOWER)
    fine[lower] = fine[lower - 1]  # an Overlap stays together
    edges = [0, *(np.flatnonzero(fine[1:] != fine[:-1]) + 1).tolist(), stop - begin]
    found: list[Region] = []
    for a, b in pairwise(edges):
        is_fine = bool(fine[a] and b - a > FEWEST and right[b - 1] - left[a] >= SHORTEST)
        if found and found[-1].fine == is_fine:
            a = found.pop().places.start - begin
        found.append(Region(slice(begin + a, begin + b), is_fine))
    return found


def bands(model: Boxes, places: slice, x: float, top: float, height: float, scale: float) -> list[Area]:
    """The boxes at `places`, neighbours on one rank, as bands."""
    areas: list[Area] = []
    reach = max(2 * CELL / scale, round_time(model, places))
    for stretch in _stretches(model, places, scale):
        width = stretch.right - stretch.left
        corners = np.linspace(stretch.left, stretch.right, 2 if stretch.pure else 2 + int(width / CELL))
        if stretch.pure:
            share = np.repeat(times_of(model, stretch.places)[:, None] * (scale / width), 2, axis=1)
        else:
            share = shares_around(model, stretch.places, corners / scale, reach)
        areas += _stack(share, x + corners, top, height)
    return areas


def _stretches(model: Boxes, places: slice, scale: float) -> list[Stretch]:
    left, right = model.start[places] * scale, model.end[places] * scale
    look = np.where(model.half[places] > 0, len(KINDS), model.kind[places])
    gap = np.append(True, left[1:] - np.maximum.accumulate(right)[:-1] > SHARP_GAP)
    first = np.flatnonzero(gap | np.append(True, look[1:] != look[:-1]))
    last = np.append(first[1:], len(left)) - 1
    begin = places.start
    found: list[Stretch] = []
    for a, b in zip(first.tolist(), last.tolist(), strict=True):
        end = max(float(right[b]), float(left[a]) + THINNEST)
        run = Stretch(slice(begin + a, begin + b + 1), float(left[a]), end, end - float(left[a]) >= SHARP_RUN)
        if gap[a] or run.pure or found[-1].pure:
            found.append(run)
        else:
            before = found[-1]
            found[-1] = Stretch(slice(before.places.start, run.places.stop), before.left, max(before.right, end), False)
    return found


def _stack(share: Floats, x: Floats, top: float, height: float) -> list[Area]:
    """One area per kind. From the top: idle, F, B, I, W; each extends a little below the next one, to leave no seam."""
    areas = []
    bottom = top + height
    level = bottom - height * np.minimum(1.0, np.cumsum(share[::-1], axis=0)[::-1])  # the upper edge of each kind
    for kind in np.flatnonzero(share.max(axis=1) > 1e-9):
        under = level[kind + 1] + SEAM if kind + 1 < len(level) else np.full_like(x, bottom)
        upper = _straightened(x, level[kind])
        lower = _straightened(x, np.minimum(bottom, under))
        areas.append(Area((*upper, *reversed(lower)), shades(KINDS[kind], 1)[0]))
    return areas


def _straightened(x: Floats, y: Floats) -> list[tuple[float, float]]:
    """The corners of a line that are needed to draw it."""
    kept = [0]
    low, high = -np.inf, np.inf  # slopes that pass all corners since the last one kept
    for n in range(1, len(x)):
        run = x[n] - x[kept[-1]]
        slope = (y[n] - y[kept[-1]]) / run
        if not low <= slope <= high:
            kept.append(n - 1)
            run = x[n] - x[n - 1]
            low, high = -np.inf, np.inf
            slope = (y[n] - y[n - 1]) / run
        low, high = max(low, slope - FLAT / run), min(high, slope + FLAT / run)
    kept.append(len(x) - 1)
    return [(float(x[n]), float(y[n])) for n in dict.fromkeys(kept)]
