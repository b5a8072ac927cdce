"""Cuts without dynamic programming: equal layers in closed form, and local search."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from zeropipe.balancing.task import BalanceTask

Array = np.ndarray[Any, np.dtype[Any]]


def equal_layers(task: BalanceTask) -> tuple[int, ...] | None:
    """The best cut of layers that are all alike, for any placement; None if memory is too small.

    A rank's time depends on how many layers it has, so layers go one by one to the rank that ends up fastest, which is
    exact; within a rank, to the stage that ends up fastest.
    """
    counts = [task.min_layers(stage) for stage in range(task.num_stages)]
    unit = task.time[0] if task.time else 0.0
    time = [unit * counts[stage] + task.beside_layers(stage)[0] for stage in range(task.num_stages)]
    loads = [sum(time[stage] for stage in stages) for stages in task.stages_of]
    for _ in range(task.num_layers - sum(counts)):
        rank = min(range(task.num_ranks), key=lambda r: ((loads[r] + unit) / task.speed[r], loads[r], r))
        stage = min(task.stages_of[rank], key=lambda s: (time[s], s))
        counts[stage] += 1
        time[stage] += unit
        loads[rank] += unit
    return tuple(counts) if task.fits(counts) else None


def even_start(task: BalanceTask) -> tuple[int, ...]:
    """The most even cut; ends may be empty where layers are few."""
    counts = [task.min_layers(stage) for stage in range(task.num_stages)]
    for _ in range(task.num_layers - sum(counts)):
        counts[counts.index(min(counts))] += 1
    return tuple(counts)


def local_search(task: BalanceTask, start: Sequence[int]) -> tuple[int, ...]:
    """Improve a cut by moving one layer at a time from a stage to another, until no move helps."""
    evaluator = _CutEvaluator(task)
    least = [task.min_layers(stage) for stage in range(task.num_stages)]
    moves = np.eye(task.num_stages, dtype=np.int64)  # one row per target stage
    best = np.array(start, np.int64)
    value = evaluator.best(best[None, :])[0]
    while True:
        found = None
        for source in range(task.num_stages):
            if best[source] <= least[source]:
                continue
            cuts = best - moves[source] + moves  # the stages in between shift by one layer
            new, at = evaluator.best(cuts)
            if new < value:
                found, value = cuts[at], new
        if found is None:
            return tuple(map(int, best))
        best = found


class _CutEvaluator:
    """Evaluates many cuts at once."""

    def __init__(self, task: BalanceTask) -> None:
        self.layers = [np.array(column) for column in task.prefix_sums]
        self.ends = np.array([task.beside_layers(stage) for stage in range(task.num_stages)])
        self.order = np.argsort(task.table, kind="stable")  # the stages of one rank follow each other
        self.first = np.searchsorted(np.array(task.table)[self.order], np.arange(task.num_ranks))
        self.in_flight, self.speed, self.memory = map(np.array, (task.in_flight, task.speed, task.memory))

    def best(self, cuts: Array) -> tuple[tuple[float, float, float], int]:
        """The best value and its index: bytes that are missing, the slowest rank, and how unequal stages are."""
        stop = np.cumsum(cuts, 1)
        start = stop - cuts
        time, fixed, kept = (column[stop] - column[start] + more for column, more in zip(self.layers, self.ends.T))
        slowest = (self._of_ranks(time) / self.speed).max(1)
        with np.errstate(divide="ignore"):
            over = np.maximum(0.0, self._of_ranks(fixed + self.in_flight * kept) / self.memory - 1).sum(1)
        over[over <= 1e-9] = 0.0
        unequal = (time**2).sum(1)
        at = int(np.lexsort((unequal, slowest, over))[0])
        return (float(over[at]), float(slowest[at]), float(unequal[at])), at

    def _of_ranks(self, values: Array) -> Array:
        return np.add.reduceat(values[:, self.order], self.first, 1)
