"""One rank as a line of characters: a cell for each interval of time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from math import floor

import numpy as np
from rich.style import Style
from rich.text import Text

from zeropipe.viz.boxes import Boxes, kinds_with_room
from zeropipe.viz.colors import MIXED, ink_on, shades
from zeropipe.viz.columns import UPPER
from zeropipe.viz.density import KINDS, Floats, round_time, shares_around, time_by_kind

IDLE = "·"
HALVES = "▀"  # its upper half in the forward's colour, the lower one in the backward's
LEVELS = ((0.95, "█"), (0.7, "▓"), (0.4, "▒"), (0.05, "░"))  # for at least this share of busy time
MIN_USED = 2 / 3  # of the columns
MAX_HIDDEN = 0.05  # of the busy time: if boxes without a cell have more, the picture shows density instead


def cell_time(models: Sequence[Boxes], longest: float, columns: int) -> float:
    """The time of one cell: the picture fills the columns, or a little less to give boxes whole cells."""
    lasts = np.concatenate([m.end - m.start for m in models])
    unit = float(min(lasts[lasts > 0], default=0.0))
    times = np.concatenate([t for m in models for t in (m.start, m.end)])
    if unit * columns >= longest and np.allclose(times, np.rint(times / unit) * unit, rtol=0, atol=1e-6 * unit):
        whole = unit / floor(unit * columns / longest * (1 + 1e-9))
        if longest / whole >= MIN_USED * columns:
            return whole
    return longest / columns


def is_dense(model: Boxes, columns: int, step: float) -> bool:
    """Whether boxes are too short for cells of `step`, so that many of them would not be visible."""
    lasts = model.end - model.start
    busy = float(lasts.sum())
    if not busy > 0:
        return False
    if busy / len(lasts) < 0.5 * step:  # certain without a look at each box
        return True
    seen = np.zeros(len(lasts), bool)
    for rank in range(model.num_ranks):
        seen[[at for at in owners(model, rank, columns, step) if at >= 0]] = True
    seen[1:] |= seen[:-1] & (model.half[:-1] == UPPER)  # the lower half is shown with the upper one
    return float(lasts[~seen].sum()) > MAX_HIDDEN * busy


def box_row(model: Boxes, rank: int, columns: int, step: float, plain: bool) -> Text:
    """Each cell shows the box that has most of it, or a dot."""
    owner = owners(model, rank, columns, step)
    used = _used_cells(model, columns, step)
    named = _named(model, step, plain)
    row = Text()
    at = 0
    while at < used:
        run = at + 1
        while run < used and owner[run] == owner[at]:
            run += 1
        if owner[at] < 0:
            row.append(IDLE * (run - at), "dim")
        else:
            _box(row, model, owner[at], run - at, plain, named)
        at = run
    return row.append(" " * (columns - used))


def dense_row(model: Boxes, rank: int, columns: int, step: float, plain: bool) -> Text:
    """Each cell is shaded by its share of busy time, and coloured by the kind that has more than half of it.

    The kind is that of the cell and its surroundings: which boxes fall into a single cell is random.
    """
    used = _used_cells(model, columns, step)
    times = time_by_kind(model, rank, np.minimum(np.arange(used + 1) * step, model.makespan))
    long = np.minimum(step, np.maximum(model.makespan - np.arange(used) * step, step * 1e-9))  # the last may be short
    shares = (times.sum(axis=0) / long).tolist()
    marks = [next((mark for least, mark in LEVELS if share >= least), IDLE) for share in shares]
    colors = [""] * used if plain else _colors(model, rank, np.linspace(0.5, used - 0.5, used) * step, step)
    row = Text()
    for (idle, color), cells in groupby(zip(marks, colors, strict=True), lambda cell: (cell[0] == IDLE, cell[1])):
        style = "dim" if idle else Style(color=color) if color else None
        row.append("".join(mark for mark, _ in cells), style)
    return row.append(" " * (columns - used))


def _colors(model: Boxes, rank: int, times: Floats, step: float) -> list[str]:
    """The colour of the kind that has most of the time around each of some times."""
    places = slice(int(model.offsets[rank]), int(model.offsets[rank + 1]))
    if places.start == places.stop:
        return [MIXED] * len(times)
    around = shares_around(model, places, times, max(step, round_time(model, places)))
    most = around.max(axis=0) > 0.5 * around.sum(axis=0) * (1 + 1e-9)
    kinds = [shades(kind, 1)[0] for kind in KINDS]
    return [kinds[top] if wins else MIXED for top, wins in zip(around.argmax(axis=0), most, strict=True)]


def _used_cells(model: Boxes, columns: int, step: float) -> int:
    """The number of cells of the timeline."""
    return min(columns, max(1, round(model.makespan / step)))


def owners(model: Boxes, rank: int, columns: int, step: float) -> list[int]:
    """For each cell the box that has most of it, or -1 where more than half of it is idle."""
    base, stop = int(model.offsets[rank]), int(model.offsets[rank + 1])
    start, end = model.start[base:stop], model.end[base:stop]
    owner, share, covered = [-1] * columns, [0.0] * columns, [0.0] * columns
    first = np.clip(np.floor(start / step + 1e-9), 0, columns - 1).astype(int).tolist()
    last = np.clip(np.ceil(end / step - 1e-9), 1, columns).astype(int).tolist()
    for i, (begin, until) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
        for cell in range(first[i], last[i]):
            part = min(until, (cell + 1) * step) - max(begin, cell * step)
            covered[cell] += part
            if part > share[cell] * (1 + 1e-9):
                owner[cell], share[cell] = base + i, part
    return [box if time >= 0.5 * step * (1 - 1e-9) else -1 for box, time in zip(owner, covered, strict=True)]


def _named(model: Boxes, step: float, plain: bool) -> frozenset[tuple[int, bool]]:
    """The looks of boxes with space for the longest label and, without colours, their letter."""
    longest = model.longest_label
    whole = kinds_with_room(model, step * (longest + plain))
    return frozenset(look for look in whole if not look[1]) | frozenset(
        look for look in kinds_with_room(model, step * (2 * longest + 2)) if look[1]
    )


def _box(row: Text, model: Boxes, i: int, cells: int, plain: bool, named: frozenset[tuple[int, bool]]) -> None:
    kind, half = int(model.kind[i]), bool(model.half[i])
    label = model.label(i) if (kind, half) in named else ""
    fill = shades(KINDS[kind], model.num_shades)[int(model.shade[i])]
    if half:
        below = shades(KINDS[int(model.kind[i + 1])], model.num_shades)[int(model.shade[i + 1])]
        both = f"X{label}&{model.label(i + 1)}" if label else "X"
        text = (both if len(both) <= cells else "X").ljust(cells, "-") if plain else HALVES * cells
        row.append(text, None if plain else Style(color=fill, bgcolor=below))
    elif plain:
        row.append((KINDS[kind] + label if len(label) < cells else KINDS[kind]).ljust(cells, "-"))
    else:
        text = label.ljust(cells) if len(label) <= cells else " " * cells
        row.append(text, Style(color=ink_on(fill), bgcolor=fill))
