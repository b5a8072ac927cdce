"""Exact cuts by dynamic programming.

With one stage per rank, the state is the number of layers already assigned. With two per rank, ranks are visited in the
order of the first pass, and the state is the number of layers that each of the two passes has assigned: in a vee the
second pass starts at the end of the model, in a loop at a layer in the middle, and every such layer is tried.
"""

from __future__ import annotations

from itertools import pairwise
from math import inf
from typing import Any

import numpy as np

from zeropipe.balancing.task import BalanceTask
from zeropipe.core.jit import Arrays, Floats, Ints, arrays
from zeropipe.core.timeline import ROUNDING

Array = np.ndarray[Any, np.dtype[Any]]
EQUAL = 1 + 1e-12


def best_of_one_per_rank(task: BalanceTask) -> tuple[int, ...] | None:
    """The best cut with one stage per rank; None if nothing fits."""
    tables = [_stage_table(task, stage) for stage in range(task.num_stages)]
    times = [time / task.speed[task.table[stage]] for stage, (time, _) in enumerate(tables)]
    for time, (_, fits) in zip(times, tables):
        time[~fits] = np.inf
    slowest = _walk(times, None)
    if slowest is None:
        return None
    most = max(float(times[s][a, b]) for s, (a, b) in enumerate(pairwise(slowest)))
    squares = [np.where(time <= most * EQUAL, tables[s][0] ** 2, np.inf) for s, time in enumerate(times)]
    points = _walk(squares, 0.0)
    assert points is not None
    return tuple(b - a for a, b in pairwise(points))


def _stage_table(task: BalanceTask, stage: int) -> tuple[Array, Array]:
    """The time of a stage from layer a to before layer b, and whether that is allowed."""
    time, fixed, kept = (np.array(column) for column in task.prefix_sums)
    more = task.beside_layers(stage)
    size = fixed + task.in_flight[stage] * kept
    needs = size[None, :] - size[:, None] + more[1] + task.in_flight[stage] * more[2]
    count = np.arange(len(time))[None, :] - np.arange(len(time))[:, None]
    fits = (count >= task.min_layers(stage)) & (needs <= task.memory[task.table[stage]] * ROUNDING)
    return time[None, :] - time[:, None] + more[0], fits


def _walk(costs: list[Array], add: float | None) -> list[int] | None:
    """The cut points with the smallest maximum (or, with `add`, the smallest sum) of costs."""
    size = len(costs[0])
    best = np.full(size, np.inf)
    best[0] = 0.0
    chosen: list[Array] = []
    for cost in costs:
        total = np.maximum(best[:, None], cost) if add is None else best[:, None] + cost
        chosen.append(total.argmin(0))
        best = total.min(0)
    if not np.isfinite(best[-1]):
        return None
    points = [size - 1]
    for step in reversed(chosen):
        points.append(int(step[points[-1]]))
    return points[::-1]


def num_pairs(task: BalanceTask) -> float:
    """About how many pairs of stages `best_of_two_per_rank` tries."""
    p, n = task.num_ranks, task.num_layers
    return n**4 / p if _is_vee(task) else n**5 / (6 * p)


def _is_vee(task: BalanceTask) -> bool:
    """Whether the second pass visits the ranks in the opposite order."""
    p = task.num_ranks
    return task.table[p:] == task.table[p - 1 :: -1]


def best_of_two_per_rank(task: BalanceTask, most: float) -> tuple[int, ...] | None:
    """The best cut with two stages per rank, in a vee or a loop, whose slowest rank takes at most `most`."""
    p, n = task.num_ranks, task.num_layers
    middles = [-1] if _is_vee(task) else sorted(range(n + 1), key=lambda m: abs(2 * m - n))
    passes = _Passes(task, arrays(len(middles) * p * (n + 1) ** 2))
    found: list[tuple[tuple[float, float], tuple[int, ...]]] = []
    for middle in middles:
        top = passes.walk(middle, most, squares=False)
        if top is None:
            continue
        most = min(most, top[0])
        counts = passes.walk(middle, most, squares=True)
        assert counts is not None
        found.append((task.objective(counts[1]), counts[1]))
    return min(found)[1] if found else None


class _Passes:
    """Both passes over the ranks, the second one from the end of the model (`middle` is -1) or from `middle`."""

    def __init__(self, task: BalanceTask, xp: Arrays) -> None:
        self.task, self.xp = task, xp
        order = task.table[: task.num_ranks]
        stages = [stage for rank in order for stage in task.stages_of[rank]]
        ends = [task.beside_layers(stage) for stage in stages]
        self.layers = [xp.list_floats(column) for column in task.prefix_sums]
        self.stages = [
            xp.list_ints([task.min_layers(stage) for stage in stages]),
            xp.list_floats([time for time, _, _ in ends]),
            xp.list_floats([fixed + task.in_flight[s] * kept for s, (_, fixed, kept) in zip(stages, ends)]),
            xp.list_floats([task.in_flight[stage] for stage in stages]),
        ]
        self.ranks = [
            xp.list_floats([task.speed[rank] for rank in order]),
            xp.list_floats([task.memory[rank] * ROUNDING for rank in order]),
        ]

    def walk(self, middle: int, most: float, squares: bool) -> tuple[float, tuple[int, ...]] | None:
        """The smallest maximum, or the smallest sum of squares, with no rank above `most`; and its counts."""
        n, p, xp = self.task.num_layers, self.task.num_ranks, self.xp
        wide = (n if middle < 0 else middle) + 1, (n if middle < 0 else n - middle) + 1
        size = wide[0] * wide[1]
        best, chosen = xp.full_floats(2 * size, inf), xp.full_ints(p * size, -1)
        xp.call(
            passes_kernel, *self.layers, *self.stages, *self.ranks, middle, wide[0], wide[1], most * EQUAL, squares,
            best, chosen,
        )  # fmt: skip
        ends = [(i, n - i) for i in range(n + 1)] if middle < 0 else [(wide[0] - 1, wide[1] - 1)]
        value, i, j = min((float(best[i * wide[1] + j]), i, j) for i, j in ends)
        if value == inf:
            return None
        counts = [0] * self.task.num_stages
        for at, rank in reversed(list(enumerate(self.task.table[:p]))):
            x, y = divmod(int(chosen[at * size + i * wide[1] + j]), n + 1)
            first, second = self.task.stages_of[rank]
            counts[first], counts[second] = x, y
            i, j = i - x, j - y
        return value, tuple(counts)


def passes_kernel(
    time: Floats, fixed: Floats, kept: Floats, least: Ints, end_time: Floats, end_size: Floats, in_flight: Floats,
    speed: Floats, memory: Floats, middle: int, rows: int, columns: int, most: float, squares: bool,
    best: Floats, chosen: Ints,
) -> None:  # fmt: skip
    """Fill `best` by the layers that each pass has assigned; its second half holds the values of the rank before.

    `chosen` gets, for each rank in turn, the layers x and y of its two stages as x * (number of layers + 1) + y.
    """
    last, size = len(time) - 1, rows * columns
    best[0] = 0.0
    far_i = far_j = 0  # the most layers that the ranks before can have
    for rank in range(len(speed)):
        for at in range(size):
            best[size + at] = best[at]
        old_i, old_j = far_i, far_j
        for i in range(rows):
            for j in range(columns):
                at = i * columns + j
                best[at] = inf
                begin = last - j if middle < 0 else middle + j
                for x in range(max(least[2 * rank], i - old_i), i + 1):
                    time0 = time[i] - time[i - x] + end_time[2 * rank]
                    if time0 / speed[rank] > most:
                        break
                    size0 = fixed[i] - fixed[i - x] + in_flight[2 * rank] * (kept[i] - kept[i - x]) + end_size[2 * rank]
                    for y in range(max(least[2 * rank + 1], j - old_j), j + 1):
                        start, stop = (begin, begin + y) if middle < 0 else (begin - y, begin)
                        time1 = time[stop] - time[start] + end_time[2 * rank + 1]
                        load = (time0 + time1) / speed[rank]
                        size1 = fixed[stop] - fixed[start] + in_flight[2 * rank + 1] * (kept[stop] - kept[start])
                        if load > most or size0 + size1 + end_size[2 * rank + 1] > memory[rank]:
                            break
                        old = best[size + (i - x) * columns + j - y]
                        value = old + time0**2 + time1**2 if squares else max(old, load)
                        if value < best[at]:
                            best[at] = value
                            chosen[rank * size + at] = x * (last + 1) + y
                            far_i, far_j = max(far_i, i), max(far_j, j)
