"""Time by kind of action, for pictures that are too coarse to show each box.

Such a picture must not pick single boxes: which ones it would pick depends on how their rhythm meets that of the
pixels, and a regular schedule turns into stripes, or a long run of one letter, that mean nothing.
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
    weight = np.where(model.half[begin:stop] > 0, 0.5, 1.0)
    out = np.zeros((len(KINDS), len(edges) - 1))
    for kind in range(len(KINDS)):
        mine = np.flatnonzero(model.kind[begin:stop] == kind)
        if len(mine):
            total = np.cumsum((end[mine] - start[mine]) * weight[mine])
            times = np.stack([start[mine], end[mine]], axis=1).ravel()
            sums = np.stack([np.append(0.0, total[:-1]), total], axis=1).ravel()
            out[kind] = np.diff(np.interp(edges, np.maximum.accumulate(times), sums))
    return out


def round_time(model: Boxes, rank: int) -> float:
    """The time of one round of boxes: of each look (kind and shade) that the rank has one, of mean length."""
    mine = slice(int(model.offsets[rank]), int(model.offsets[rank + 1]))
    looks = len(np.unique(model.kind[mine] * model.num_shades + model.shade[mine]))
    busy = float(np.sum((model.end[mine] - model.start[mine]) * np.where(model.half[mine] > 0, 0.5, 1.0)))
    return looks * busy / max(1, mine.stop - mine.start)


def smoothed(values: Floats, reach: float) -> Floats:
    """Each column as the mean of those around it, with weights that fall to 0 at `reach` columns away.

    A reach of one rhythm of the values, or more, leaves little of that rhythm.
    """
    wide = int(np.ceil(reach))
    weights = np.maximum(0.0, 1.0 - np.abs(np.arange(-wide, wide + 1)) / max(reach, 1.0))
    counted = np.convolve(np.ones(values.shape[-1]), weights)[wide : wide + values.shape[-1]]
    rows = [np.convolve(row, weights)[wide : wide + len(row)] / counted for row in values]
    return np.array(rows)
