"""The W that can be pending on a rank when one of its passes begins: whole parts, as many as its memory holds."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from zeropipe.core.timeline import ROUNDING
from zeropipe.searching.tables import Array

MAX_SUMS = 300  # of one rank: with more of them there is one near every duration


class PendingW(NamedTuple):
    """Durations and memory of sums of whole parts of W, by rank; none for a rank whose W may be interrupted."""

    duration: Array  # of each sum, those of a rank in ascending order
    memory: Array  # that the parts keep
    start: Array  # index of each rank's first sum, and the number of all


def pending_sums(kinds: Array, max_counts: list[int], limit: float) -> tuple[Array, Array]:
    """Return durations and memory of all sums of parts that fit into `limit`; none if they are too many.

    `kinds` has the duration and the memory of a part, one line per kind, and `max_counts` how many parts there are.
    """
    duration, memory = kinds.T
    counts = np.zeros((1, 0), np.int64)
    for kind, max_count in enumerate(max_counts):
        more = np.tile(np.arange(max_count + 1), len(counts))[:, None]
        counts = np.concatenate([np.repeat(counts, max_count + 1, axis=0), more], axis=1)
        counts = counts[counts @ memory[: kind + 1] <= limit * ROUNDING]
        if len(counts) > MAX_SUMS:
            return np.zeros(0), np.zeros(0)
    order = np.argsort(counts @ duration, kind="stable")
    return (counts @ duration)[order], (counts @ memory)[order]


def pending_w(
    duration: Array, stash: Array, stages: list[Array], limits: Array, is_whole: list[bool], weight_parts: int, m: int
) -> PendingW:
    """Return the sums of ranks with these stages and memory limits, for m microbatches, where W are whole."""
    sums = []
    for own, limit, whole in zip(stages, limits, is_whole, strict=True):
        pairs = list(zip((duration[own] / weight_parts).tolist(), (stash[own] / weight_parts).tolist(), strict=True))
        kinds = list(dict.fromkeys(pairs))
        counts = [pairs.count(kind) * m * weight_parts for kind in kinds]
        sums.append(pending_sums(np.array(kinds), counts, float(limit)) if whole else (np.zeros(0), np.zeros(0)))
    return PendingW(
        duration=np.concatenate([durations for durations, _ in sums]),
        memory=np.concatenate([memory for _, memory in sums]),
        start=np.cumsum([0, *(len(durations) for durations, _ in sums)]),
    )
