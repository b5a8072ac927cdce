"""Time by kind of action, for pictures that are too coarse to show each box.

Such a picture must not sample single boxes: by aliasing, a regular schedule would show stripes, or a long run of one
letter, that do not exist.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from zeropipe.viz.boxes import Boxes

KINDS = "FBIW"
Floats = NDArray[np.float64]


def time_by_kind(model: Boxes, rank: int, edges: Floats) -> Floats:
    """Time that a rank spends in F, B, I and W between neighbouring edges; each half of an Overlap has half of it."""
    begin, stop = int(model.offsets[rank]), int(model.offsets[rank + 1])
    start, end = model.start[begin:stop], model.end[begin:stop]
    out = np.zeros((len(KINDS), len(edges) - 1))
    for kind in range(len(KINDS)):
        mine = np.flatnonzero(model.kind[begin:stop] == kind)
        if len(mine):
            knots, sums = _running(start[mine], end[mine], model.half[begin:stop][mine])
            out[kind] = np.diff(np.interp(edges, knots, sums))
    return out


def times_of(model: Boxes, places: slice) -> Floats:
    """Time spent in F, B, I and W by the boxes at `places`."""
    lasts = (model.end[places] - model.start[places]) * np.where(model.half[places] > 0, 0.5, 1.0)
    return np.bincount(model.kind[places], lasts, len(KINDS)).astype(np.float64)


def round_time(model: Boxes, places: slice) -> float:
    """The time of one round of boxes: one of each look (kind and shade) at `places`, of mean length."""
    looks = len(np.unique(model.kind[places] * model.num_shades + model.shade[places]))
    return looks * float(times_of(model, places).sum()) / max(1, places.stop - places.start)


def shares_around(model: Boxes, places: slice, times: Floats, reach: float) -> Floats:
    """The shares of F, B, I and W around some times: weights fall linearly to 0 at the distance `reach`.

    If `reach` is the time of one round, a regular pattern of boxes has the same shares everywhere. Only the boxes at
    `places` count, which are neighbours on one rank, and only the time from the first to the last of them.
    """
    start, end = model.start[places], model.end[places]
    first = float(start[0])
    at = times - first
    long = max(float(end.max()) - first, 1e-300)
    total = _second_difference(np.array([0.0, long]), np.array([0.0, long]), at, reach)
    out = np.zeros((len(KINDS), len(times)))
    for kind in range(len(KINDS)):
        mine = np.flatnonzero(model.kind[places] == kind)
        if len(mine):
            knots, sums = _running(start[mine] - first, end[mine] - first, model.half[places][mine])
            np.divide(_second_difference(knots, sums, at, reach), total, out=out[kind], where=total > 0)
    return np.clip(out, 0.0, 1.0)


def _running(start: Floats, end: Floats, half: NDArray[np.int64]) -> tuple[Floats, Floats]:
    """Times, and the time spent in these boxes up to each; each half of an Overlap has half of it."""
    total = np.cumsum((end - start) * np.where(half > 0, 0.5, 1.0))
    knots = np.stack([start, end], axis=1).ravel()
    return np.maximum.accumulate(knots), np.stack([np.append(0.0, total[:-1]), total], axis=1).ravel()


def _second_difference(knots: Floats, sums: Floats, at: Floats, reach: float) -> Floats:
    """The integral, with weights that fall from 1 to 0 at `reach`, of the function whose running sum is `sums`."""
    lasts = np.diff(knots)
    slopes = np.append(np.divide(np.diff(sums), lasts, out=np.zeros_like(lasts), where=lasts > 0), 0.0)
    areas = np.append(0.0, np.cumsum((sums[1:] + sums[:-1]) / 2 * lasts))

    def area(time: Floats) -> Floats:
        n = np.clip(np.searchsorted(knots, time, "right") - 1, 0, None)
        past = np.maximum(0.0, time - knots[n])
        return areas[n] + sums[n] * past + slopes[n] * past**2 / 2

    return (area(at + reach) - 2 * area(at) + area(at - reach)) / reach
