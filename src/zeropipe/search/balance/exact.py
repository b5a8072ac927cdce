"""Exact cuts by dynamic programming.

With one stage per rank the state is how many layers are used up. With two per rank the ranks are visited in the order
of the first pass, and the state is how many layers each of the two passes has used up: in a vee the second pass comes
from the end of the model, in a loop from a place in the middle that is tried everywhere.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from zeropipe.core.timeline import ROUNDING
from zeropipe.search.balance.task import BalanceTask

Array = np.ndarray[Any, np.dtype[Any]]
EQUAL = 1 + 1e-12


def one_pass(task: BalanceTask) -> tuple[int, ...] | None:
    """The best cut with one stage per rank, None if nothing fits."""
    tables = [_stage_table(task, stage) for stage in range(task.num_stages)]
    times = [time / task.speed[task.table[stage]] for stage, (time, _) in enumerate(tables)]
    for time, (_, fits) in zip(times, tables):
        time[~fits] = np.inf
    slowest = _walk(times, None)
    if slowest is None:
        return None
    most = max(float(times[s][a, b]) for s, (a, b) in enumerate(pairwise(slowest)))
    squares = [np.where(time <= most * EQUAL, tables[s][0] ** 2, np.inf) for s, time in enumerate(times)]
    places = _walk(squares, 0.0)
    assert places is not None
    return tuple(b - a for a, b in pairwise(places))


def _stage_table(task: BalanceTask, stage: int) -> tuple[Array, Array]:
    """The time of a stage from layer a to before layer b, and whether that is allowed."""
    time, fixed, held = (np.array(column) for column in task.before)
    more = task.ends(stage)
    size = fixed + task.alive[stage] * held
    needs = size[None, :] - size[:, None] + more[1] + task.alive[stage] * more[2]
    count = np.arange(len(time))[None, :] - np.arange(len(time))[:, None]
    fits = (count >= task.least(stage)) & (needs <= task.memory[task.table[stage]] * ROUNDING)
    return time[None, :] - time[:, None] + more[0], fits


def _walk(costs: list[Array], add: float | None) -> list[int] | None:
    """The places of the cuts with the least maximum (or, with `add`, the least sum) of costs."""
    size = len(costs[0])
    best = np.full(size, np.inf)
    best[0] = 0.0
    came: list[Array] = []
    for cost in costs:
        total = np.maximum(best[:, None], cost) if add is None else best[:, None] + cost
        came.append(total.argmin(0))
        best = total.min(0)
    if not np.isfinite(best[-1]):
        return None
    places = [size - 1]
    for step in reversed(came):
        places.append(int(step[places[-1]]))
    return places[::-1]


def two_passes(task: BalanceTask, most: float) -> tuple[int, ...] | None:
    """The best cut with two stages per rank, in a vee or a loop, whose slowest rank takes at most `most`."""
    p = task.num_ranks
    back = task.table[p:] == task.table[p - 1 :: -1]
    found: list[tuple[tuple[float, float], tuple[int, ...]]] = []
    for middle in [None] if back else sorted(range(task.num_layers + 1), key=lambda m: abs(2 * m - task.num_layers)):
        steps = _Passes(task, middle)
        top = steps.walk(most, squares=False)
        if top is None:
            continue
        most = min(most, top[0])
        counts = steps.walk(most, squares=True)
        assert counts is not None
        found.append((task.value(counts[1]), counts[1]))
    return min(found)[1] if found else None


class _Passes:
    """Both passes over the ranks, the second one from the end of the model or from `middle`."""

    def __init__(self, task: BalanceTask, middle: int | None) -> None:
        self.task, self.middle = task, middle
        n = task.num_layers
        self.sizes = (n, n) if middle is None else (middle, n - middle)
        self.places = [np.arange(self.sizes[0] + 1), np.arange(self.sizes[1] + 1)]

    def walk(self, most: float, squares: bool) -> tuple[float, tuple[int, ...]] | None:
        """The least maximum, or the least sum of squares, with no rank above `most`; and the counts of it."""
        task, shape = self.task, (self.sizes[0] + 1, self.sizes[1] + 1)
        best = np.full(shape, np.inf)
        best[0, 0] = 0.0
        came: list[Array] = []
        for rank in task.table[: task.num_ranks]:
            first, second = task.stages_of[rank]
            new, step = np.full(shape, np.inf), np.full((2, *shape), -1, np.int32)
            for x in range(task.least(first), shape[0]):
                time0, size0 = self._stage(first, 0, x)
                if float(time0.min(initial=np.inf)) / task.speed[rank] > most * EQUAL:
                    break
                for y in range(task.least(second), shape[1]):
                    if self.middle is None and x + y > task.num_layers:
                        break
                    time1, size1 = self._stage(second, 1, y)
                    load = (time0[:, None] + time1[None, :]) / task.speed[rank]
                    allowed = (load <= most * EQUAL) & (size0[:, None] + size1[None, :] <= task.memory[rank] * ROUNDING)
                    if not allowed.any():
                        if float(load.min(initial=np.inf)) > most * EQUAL:
                            break
                        continue
                    old = best[: shape[0] - x, : shape[1] - y]
                    value = old + time0[:, None] ** 2 + time1[None, :] ** 2 if squares else np.maximum(old, load)
                    value = np.where(allowed, value, np.inf)
                    place = new[x:, y:]
                    better = value < place
                    place[better] = value[better]
                    step[0, x:, y:][better], step[1, x:, y:][better] = x, y
            best = new
            came.append(step)
        return self._result(best, came)

    def _stage(self, stage: int, which: int, count: int) -> tuple[Array, Array]:
        """Time and bytes of a stage with `count` layers, by how many layers its pass has used up before."""
        used = self.places[which][: self.sizes[which] + 1 - count]
        if which == 0:
            start = used
        elif self.middle is None:
            start = self.task.num_layers - used - count
        else:
            start = self.middle + used
        time, fixed, held = (np.array(column) for column in self.task.before)
        more, alive = self.task.ends(stage), self.task.alive[stage]
        size = fixed + alive * held
        return time[start + count] - time[start] + more[0], size[start + count] - size[start] + more[1] + alive * more[
            2
        ]

    def _result(self, best: Array, came: list[Array]) -> tuple[float, tuple[int, ...]] | None:
        n = self.task.num_layers
        if self.middle is None:
            ends = [(float(best[i, n - i]), i, n - i) for i in range(n + 1)]
            value, i, j = min(ends)
        else:
            i, j = self.sizes
            value = float(best[i, j])
        if not np.isfinite(value):
            return None
        counts = [0] * self.task.num_stages
        for rank, step in zip(reversed(self.task.table[: self.task.num_ranks]), reversed(came)):
            x, y = int(step[0, i, j]), int(step[1, i, j])
            first, second = self.task.stages_of[rank]
            counts[first], counts[second] = x, y
            i, j = i - x, j - y
        return value, tuple(counts)
