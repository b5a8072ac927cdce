"""Rows for more microbatches, from rows whose middle repeats."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from zeropipe.searching.tables import Array
from zeropipe.searching.task import SearchTask

MAX_REPEATED = 4  # microbatches in the part that is repeated


def stretch_rows(short: SearchTask, rows: Array, task: SearchTask) -> Array | None:
    """Return the rows of `short` with a part of their middle repeated until `task` has all its microbatches.

    None where the row of some rank has no part that holds every pass equally often.
    """
    missing = task.num_microbatches - short.num_microbatches
    longer: list[Array] = []
    for rank in range(task.num_ranks):
        row = rows[short.tables.row_start[rank] : short.tables.row_start[rank + 1]]
        counts = [count for count in range(1, MAX_REPEATED + 1) if missing % count == 0]
        windows = [(at, count, repeats) for count in counts for at, repeats in _windows(row, count)]
        if not windows:
            return None
        # best is a part that is repeated already, then a short one, then one near the middle
        _, count, _, at = min((not repeats, count, abs(2 * at - len(row)), at) for at, count, repeats in windows)
        size = count * len(row) // short.num_microbatches
        longer.append(np.concatenate([row[:at], np.tile(row[at : at + size], missing // count), row[at:]]))
    return np.concatenate(longer)


def _windows(row: Array, count: int) -> Iterator[tuple[int, bool]]:
    """Return the index of every window that holds each pass `count` times, and whether it repeats at once."""
    names, passes = np.unique(row, return_inverse=True)
    size = len(names) * count
    one_hot = np.eye(len(names), dtype=np.int64)[passes]
    sums = np.concatenate([np.zeros((1, len(names)), np.int64), np.cumsum(one_hot, 0)])
    for at in np.flatnonzero((sums[size:] - sums[:-size] == count).all(axis=1)):
        yield int(at), bool(np.array_equal(row[at : at + size], row[at + size : at + 2 * size]))
