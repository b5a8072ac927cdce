"""Rows for more microbatches, from rows whose middle repeats."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from zeropipe.searching.model import Array, Task

UNITS = (1, 2, 3, 4)  # microbatches in what repeats


def stretched(short: Task, rows: Array, task: Task, middle: float = 0.5) -> Array | None:
    """The rows of `short` with what happens in their middle repeated until `task` has all its microbatches.

    None where some rank has no part in its middle that holds every pass equally often.
    """
    missing = task.num_microbatches - short.num_microbatches
    longer: list[Array] = []
    for rank in range(task.num_ranks):
        row = rows[short.model.begin[rank] : short.model.begin[rank + 1]]
        windows = [window for unit in UNITS if missing % unit == 0 for window in _windows(row, unit)]
        if not windows:
            return None
        # best is what repeats by itself, then what is short, then what is near the middle
        _, unit, _, at = min((not same, unit, abs(2 * at - 2 * middle * len(row)), at) for at, unit, same in windows)
        size = unit * len(row) // short.num_microbatches
        longer.append(np.concatenate([row[:at], np.tile(row[at : at + size], missing // unit), row[at:]]))
    return np.concatenate(longer)


def _windows(row: Array, unit: int) -> Iterator[tuple[int, int, bool]]:
    """(place, unit, whether it repeats at once) of every window that holds each pass `unit` times."""
    names, passes = np.unique(row, return_inverse=True)
    size = len(names) * unit
    counts = np.concatenate(
        [np.zeros((1, len(names)), np.int64), np.cumsum(np.eye(len(names), dtype=np.int64)[passes], 0)]
    )
    for at in np.flatnonzero((counts[size:] - counts[:-size] == unit).all(axis=1)):
        yield int(at), unit, bool(np.array_equal(row[at : at + size], row[at + size : at + 2 * size]))
