"""Rows: samples packed together, and a random order of rows that needs no memory.

The order is a pure function of the seed, the epoch and the position, the same on every machine.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

PACKING_WINDOW = 8192  # samples that are packed together
_PACKING_KEY = 0x726F7773  # which samples share a row is independent of train.seed, so that seeds share a cache
_FEISTEL_ROUNDS = 6
_UINT64_MAX = 2**64 - 1

IntArray = NDArray[np.int64]


def write_rows(
    folder: Path, num_samples: int, sequence: int, is_shuffled: bool, report_progress: Callable[[str], None]
) -> int:
    """Pack the samples of a store into rows, and return their number. If no row has several, nothing is written."""
    lengths = np.memmap(folder / "lengths", dtype=np.int32, mode="r", shape=(num_samples,))
    num_rows = 0
    with (folder / "row_ends").open("wb") as ends, (folder / "row_samples").open("wb") as members:
        for start in range(0, num_samples, PACKING_WINDOW):
            window = np.arange(start, min(start + PACKING_WINDOW, num_samples), dtype=np.int64)
            if is_shuffled:
                window = permute(window, num_samples, _PACKING_KEY)
            rows = pack_rows(lengths[window], sequence)
            ends.write((start + np.cumsum([len(row) for row in rows])).astype(np.int64).tobytes())
            members.write(window[np.concatenate(rows)].astype(np.int64).tobytes())
            num_rows += len(rows)
            report_progress(f"packing {start + len(window):,} of {num_samples:,} samples")
    if num_rows == num_samples:
        (folder / "row_ends").unlink()
        (folder / "row_samples").unlink()
    return num_rows


def pack_rows(lengths: NDArray[Any], sequence: int) -> list[list[int]]:
    """Pack samples into rows of at most `sequence` tokens: best fit, the longest sample first.

    Rows are ordered by their first samples, and the samples of a row by their indices.
    """
    rows: list[list[int]] = []
    by_space: dict[int, list[int]] = {}  # free tokens -> rows
    spaces = 0  # bit n is set if a row has n free tokens
    for index in sorted(range(len(lengths)), key=lambda index: (-int(lengths[index]), index)):
        length = int(lengths[index])
        fitting = spaces >> length
        if fitting:
            space = length + (fitting & -fitting).bit_length() - 1  # the smallest that fits
            row = by_space[space].pop()
            if not by_space[space]:
                spaces &= ~(1 << space)
        else:
            space, row = sequence, len(rows)
            rows.append([])
        rows[row].append(index)
        if space - length >= 2:  # no sample is shorter
            by_space.setdefault(space - length, []).append(row)
            spaces |= 1 << (space - length)
    return sorted(sorted(row) for row in rows)


def rows_at(positions: IntArray, num_rows: int | None, seed: int, shuffle: bool) -> list[int]:
    """The rows at some positions of a run, which count the rows of all epochs. `num_rows` is that of an epoch."""
    if num_rows is None:
        return positions.tolist()
    rows = positions % num_rows
    if shuffle:
        for epoch in np.unique(positions // num_rows):
            own = positions // num_rows == epoch
            rows[own] = permute(rows[own], num_rows, seed, int(epoch))
    return rows.tolist()


def permute(indices: IntArray, size: int, *keys: int) -> IntArray:
    """Apply the random permutation of 0 .. size-1 that `keys` select to some indices.

    A Feistel network permutes the integers of an even number of bits. A result of `size` or more goes through it again
    until it is smaller. So no permutation is held in memory.
    """
    half = np.uint64(max(2, ((size - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    found = indices.astype(np.uint64)
    outside = np.ones(found.shape, dtype=bool)
    while outside.any():
        left, right = found[outside] >> half, found[outside] & mask
        for number in range(_FEISTEL_ROUNDS):
            left, right = right, left ^ (hash_integers(right, *keys, number) & mask)
        found[outside] = (left << half) | right
        outside[outside] = found[outside] >= size
    return found.astype(np.int64)


def hash_integers(values: NDArray[np.uint64], *keys: int) -> NDArray[np.uint64]:
    """Pseudo-random numbers, a pure function of each value and the keys."""
    found = values.astype(np.uint64)
    for key in keys:
        found = _splitmix64(found + np.uint64(int(_splitmix64(np.uint64(key & _UINT64_MAX))) & _UINT64_MAX))
    return found


def _splitmix64(x: Any) -> Any:
    """The finaliser of the generator splitmix64."""
    with np.errstate(over="ignore"):
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))
