"""How long a rank's memory makes it take: microbatches take turns in it, and have to pass each other (crossing.py)."""

from __future__ import annotations

from math import ceil

import numpy as np

from zeropipe.core.jit import compiled
from zeropipe.search.crossing import BACK, EITHER, WEIGHT, laps
from zeropipe.search.model import Array, Task
from zeropipe.search.way import Way

NEAR = 1e-11  # relative: so near is equal
LEAST, MOST = 64, 2048  # states


def in_turns(task: Task, way: Way, stage: int, turns: int, effort: int) -> float:
    """From the first F of a stage to its last I, where every rank has one stage.

    No more than `turns` of the microbatches that fit into memory are followed: others could only delay them. `effort`
    decides how many of the states that they can be in are kept apart.
    """
    m, size, room = task.num_microbatches, float(task.model.needs[stage]), _room(task, stage)
    if size <= 0 or room == np.inf:
        return 0.0
    fit = int(room / size)
    turns = min(turns, fit)
    if fit >= m or turns < 2 or stage == task.num_stages - 1:
        return 0.0
    last = (m - 1) % fit
    best = 0.0
    for chosen in {tuple(sorted((last - back) % fit for back in range(turns))), tuple(range(turns))}:
        followed = np.array([j for j in range(m) if j % fit in chosen])
        states = min(MOST, max(LEAST, effort // (len(followed) * task.num_stages**2)))
        best = max(best, _follow(task, way, stage, fit, followed, turns, states))
    return best


def _room(task: Task, stage: int) -> float:
    """The memory of its rank."""
    return float(task.model.limit[task.model.home[stage]])


def _follow(task: Task, way: Way, stage: int, fit: int, followed: Array, turns: int, states: int) -> float:
    """The same by some of the microbatches."""
    final = 2 * task.num_stages - 1
    stages = np.arange(stage, task.num_stages)
    f, i = way.lasts[stages], way.lasts[final - stages]
    down, up = way.lag[stages], way.lag[final - stages]
    w, size, kept = float(way.weight[stage]), float(task.model.needs[stage]), float(way.stash[stage])
    parts = task.problem.num_weight_parts
    over = fit * size + kept - _room(task, stage)
    mode, wait = np.full(turns, BACK), np.zeros(turns)
    # when the F that would be one too many begins, room has been made by W, or by the I of the microbatch behind
    enough = over <= size - kept
    for turn in range(turns if over > 0 else 0):
        beside = len(followed) <= turn + 1 or followed[turn + 1] - followed[turn] == 1
        pieces = ceil(over / kept * parts - 1e-9) * w / parts
        again = float(i[0]) + (0.0 if enough else min(pieces, float(i[0])))
        if kept >= size:
            mode[turn], wait[turn] = (WEIGHT, w) if parts == 1 else (BACK, pieces)
        elif parts == 1 and beside:
            mode[turn], wait[turn] = EITHER, again - float(i[0])
        else:
            wait[turn] = min(pieces, again)
    p, width = len(stages), len(stages) * turns + 1
    near = NEAR * float(way.head[final - stage] + i[0])
    least = compiled(laps)(
        f, i, down, up, w, wait, mode, followed, near,
        np.empty((states, width)), np.empty((states + 2, width)), np.empty(2 * p),
        np.zeros(turns + 1, np.int64), np.empty(2 * p * turns, np.int64), np.empty(p * turns),
    )  # fmt: skip
    rest = task.num_microbatches - 1 - int(followed[-1])
    return float(least) + (1 + rest) * float(i[0]) - 2 * len(followed) * near
