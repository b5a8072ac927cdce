"""Cuts without a table of all states: equal layers in closed form, and steps from a cut to a better one."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from zeropipe.search.balance.task import BalanceTask


def equal_layers(task: BalanceTask) -> tuple[int, ...] | None:
    """The best cut of layers that are all alike, whatever the placement; None where there is too little memory.

    A rank's time depends on how many layers it has, so layers go one by one to the rank that ends up fastest, which is
    exact; within a rank, to the stage that ends up fastest.
    """
    counts = [task.least(stage) for stage in range(task.num_stages)]
    unit = task.time[0] if task.time else 0.0
    time = [unit * counts[stage] + task.ends(stage)[0] for stage in range(task.num_stages)]
    loads = [sum(time[stage] for stage in stages) for stages in task.stages_of]
    for _ in range(task.num_layers - sum(counts)):
        rank = min(range(task.num_ranks), key=lambda r: ((loads[r] + unit) / task.speed[r], loads[r], r))
        stage = min(task.stages_of[rank], key=lambda s: (time[s], s))
        counts[stage] += 1
        time[stage] += unit
        loads[rank] += unit
    return tuple(counts) if task.fits(counts) else None


def spread(task: BalanceTask) -> tuple[int, ...]:
    """Layers as even as can be, none where there are too few."""
    counts = [task.least(stage) for stage in range(task.num_stages)]
    for _ in range(task.num_layers - sum(counts)):
        counts[counts.index(min(counts))] += 1
    return tuple(counts)


def climb(task: BalanceTask, start: Sequence[int]) -> tuple[int, ...]:
    """From a cut to better ones, moving one layer at a time from stage to stage, until no move helps."""
    best, value = tuple(start), _penalised(task, start)
    while True:
        found = None
        for source in range(task.num_stages):
            if best[source] <= task.least(source):
                continue
            for target in range(task.num_stages):
                if source == target:
                    continue
                counts = list(best)
                counts[source] -= 1
                counts[target] += 1  # the stages in between shift by one layer
                new = _penalised(task, counts)
                if new < value:
                    found, value = tuple(counts), new
        if found is None:
            return best
        best = found


def _penalised(task: BalanceTask, counts: Sequence[int]) -> tuple[float, float, float]:
    """What does not fit comes last, the more so the more is missing."""
    over = sum(max(0.0, size / most - 1) if most > 0 else inf for size, most in zip(task.ranks(counts)[1], task.memory))
    slowest, unequal = task.value(counts)
    return (over if over > 1e-9 else 0.0), slowest, unequal
