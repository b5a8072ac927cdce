"""Which W a rank can owe when one of its passes begins: whole ones, or whole parts, and as many as its memory holds."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from zeropipe.searching.model import Array

MOST = 300  # choices of W of one rank: with more of them there is one for nearly every time
ROUNDED = 1 + 1e-9  # sums of memory are


class Owed(NamedTuple):
    """Choices of W, rank by rank; none for a rank whose W may be interrupted by passes."""

    kind: Array  # of each stage's W: those of a rank that last as long and keep as much are of one kind ...
    kind_first: Array  # ... and where the kinds of each rank begin
    lasts: Array  # how long each choice takes, the shortest of a rank first ...
    keeps: Array  # ... the memory that it keeps ...
    parts: Array  # ... how many parts of each of the rank's kinds it has ...
    first: Array  # ... and where those of each rank begin


def owed_of(weight: Array, keeps: Array, own: list[Array], room: Array, whole: list[bool], parts: int, m: int) -> Owed:
    """The choices of ranks with these stages and memory, of m microbatches, where W are `whole`."""
    kind, kind_first, found = np.zeros(len(weight), np.int64), [0], []
    for mine, space, wanted in zip(own, room, whole, strict=True):
        pairs = list(zip(weight[mine].tolist(), keeps[mine].tolist(), strict=True))
        kinds = list(dict.fromkeys(pairs))
        kind[mine] = [kind_first[-1] + kinds.index(pair) for pair in pairs]
        kind_first.append(kind_first[-1] + len(kinds))
        counts = np.zeros((0, len(kinds)), np.int64)
        if wanted:
            sizes = np.array([size for _, size in kinds]) / parts
            counts = _counts(sizes, [pairs.count(pair) * m * parts for pair in kinds], float(space))
        times = counts @ np.array([time for time, _ in kinds]) / parts
        order = np.argsort(times, kind="stable")
        found.append((times[order], counts[order] @ np.array([size for _, size in kinds]) / parts, counts[order]))
    most = max(counts.shape[1] for _, _, counts in found)
    padded = [np.pad(counts, ((0, 0), (0, most - counts.shape[1]))) for _, _, counts in found]
    return Owed(
        kind,
        np.array(kind_first),
        np.concatenate([times for times, _, _ in found]),
        np.concatenate([kept for _, kept, _ in found]),
        np.concatenate(padded),
        np.cumsum([0, *(len(times) for times, _, _ in found)]),
    )


def _counts(sizes: Array, most: list[int], room: float) -> Array:
    """How many parts of each kind fit together, in all ways; none at all if there are too many ways."""
    counts = np.zeros((1, 0), np.int64)
    for at, number in enumerate(most):
        more = np.tile(np.arange(number + 1), len(counts))[:, None]
        counts = np.concatenate([np.repeat(counts, number + 1, axis=0), more], axis=1)
        counts = counts[counts @ sizes[: at + 1] <= room * ROUNDED]
        if len(counts) > MOST:
            return np.zeros((0, len(most)), np.int64)
    return counts
