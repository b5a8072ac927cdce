"""Samples into rows: best fit, window by window."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zeropipe.train.data.order import shuffled

WINDOW = 8192  # samples that are put into rows together
_SHUFFLE = 0x726F7773  # which samples meet in a row does not depend on the seed: it would be another cache for each


def pack(lengths: NDArray[Any], sequence: int) -> list[list[int]]:
    """Rows of at most `sequence` tokens: from the longest sample on, each goes where least room is left.

    Rows are in the order of their first samples, and so are samples in a row.
    """
    rows: list[list[int]] = []
    by_room: dict[int, list[int]] = {}  # rows by the tokens that they have room for
    rooms = 0  # bit n is set if a row has room for n tokens
    for index in sorted(range(len(lengths)), key=lambda index: (-int(lengths[index]), index)):
        length = int(lengths[index])
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            row = by_room[room].pop()
            if not by_room[room]:
                rooms &= ~(1 << room)
        else:
            room, row = sequence, len(rows)
            rows.append([])
        rows[row].append(index)
        if room - length >= 2:  # no sample is shorter
            by_room.setdefault(room - length, []).append(row)
            rooms |= 1 << (room - length)
    return sorted(sorted(row) for row in rows)


def write_rows(folder: Path, num_samples: int, sequence: int, is_shuffled: bool, beat: Callable[[str], None]) -> int:
    """Pack all samples of a folder; the number of rows. Without several samples in a row nothing is written."""
    lengths = np.memmap(folder / "lengths", dtype=np.int32, mode="r", shape=(num_samples,))
    num_rows = 0
    with (folder / "row_ends").open("wb") as ends, (folder / "row_samples").open("wb") as members:
        for start in range(0, num_samples, WINDOW):
            window = np.arange(start, min(start + WINDOW, num_samples), dtype=np.int64)
            if is_shuffled:
                window = shuffled(window, num_samples, _SHUFFLE)
            rows = pack(lengths[window], sequence)
            ends.write((start + np.cumsum([len(row) for row in rows])).astype(np.int64).tobytes())
            members.write(window[np.concatenate(rows)].astype(np.int64).tobytes())
            num_rows += len(rows)
            beat(f"packing {start + len(window):,} of {num_samples:,} samples")
    if num_rows == num_samples:
        (folder / "row_ends").unlink()
        (folder / "row_samples").unlink()
    return num_rows
