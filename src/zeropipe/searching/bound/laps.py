"""How long a rank's memory makes it take: microbatches take turns in it, and have to pass each other (crossing.py)."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

import numpy as np

from zeropipe.core.jit import compiled
from zeropipe.searching.bound.crossing import BITS, laps
from zeropipe.searching.bound.way import Way
from zeropipe.searching.model import Array, Task

NEAR = 1e-11  # of a microbatch's way, for all its actions together: so near is equal
FEWEST = 2  # microbatches that are followed at first
FREE = 5  # fewer than so many are followed without a cap: that tells the least time of any part
GROWTH = 5.0  # of the effort with each that is followed as well, before it is known
KEPT = 8  # states that have come equally far, the others become one with one of them
KEYS = 1 << 15  # different ways to have come so far


class Path(NamedTuple):
    """The actions of a microbatch from the F of a stage to its I, or its W."""

    rank: Array
    lasts: Array
    lag: Array  # from the end of an action to the begin of the next one
    back_at: int  # so many actions: then I has run, and maybe W has not
    ahead: Array  # the least time from the begin of an action to the end of I
    again: float  # the least time from that to the begin of the microbatch that takes its turn
    back: Array  # memory: before an action, the microbatch so far back ...
    upto: Array  # ... has run so many of its actions
    after: Array  # ... so long ago
    wait: float  # from the last action to the begin of the microbatch that takes turns with it
    parts: int  # of a W, where the W of the first rank are looked at one by one
    weight: float  # the time of such a part
    keeps: float  # and its memory
    size: float  # of an activation of the first stage
    room: float  # the memory of the first rank
    rest: Array  # the work of a microbatch that a rank has before it when so many actions have run
    drain: Array  # what comes on top of that behind the last F of a rank ...
    last_f: Array  # ... which is this action
    behind: float  # what comes behind the last I of this path is not counted
    reach: float  # the longest time after its end at which an action matters to others


class Room(NamedTuple):
    """For the kernel to work in: two layers of keys, each with some states."""

    keys: Array
    sizes: Array  # how many states have a key
    left: Array  # the least time that is left with it
    states: Array
    table: Array
    come: Array
    ready: Array
    new_come: Array
    new_ready: Array
    new: Array
    now: Array
    looked: Array
    stop: Array
    ends: Array  # of the I of each microbatch at the earliest
    later: Array  # the least time from then to the last one, by those that take its turns


def in_turns(
    task: Task, way: Way, stage: int, cap: float, drain: Array, behind: float, effort: int, stop: Array
) -> tuple[float, int]:
    """From the first F of a stage to its last I, or `cap` if that takes as long; and how much effort is left.

    `drain`: what comes on top of each rank's work behind its last F; `behind`: what comes behind that I. At first a few
    of the microbatches that fit into memory are followed, then more of them while the effort suffices: leaving others
    out can only make it faster.
    """
    m, size, room = task.num_microbatches, float(task.model.needs[stage]), _room(task, stage)
    if size <= 0 or room == np.inf or not 2 <= int(room / size) < m:
        return 0.0, effort
    rounds = _Rounds(task, way, stage, int(room / size), drain, behind, stop)
    best, growth, before = 0.0, GROWTH, 0
    takes = np.zeros(m + 1)  # the least time of so many microbatches in a row
    for turns in range(min(FEWEST, rounds.fit), rounds.fit + 1):
        if 2 * task.num_stages + 1 >= 1 << BITS or BITS * turns > 56:
            break
        free = turns < FREE and turns < rounds.fit
        found, ends, looked = rounds.follow(turns, np.inf if free else cap, takes, effort)
        if free:
            takes = np.maximum(takes, ends)
        best, effort = max(best, found), effort - looked
        growth = max(2.0, looked / before) if before else growth
        if best >= cap or looked * growth > effort or stop[0]:
            break
        before = looked
    return min(best, cap), effort


def _room(task: Task, stage: int) -> float:
    """The memory of its rank."""
    return float(task.model.limit[task.model.home[stage]])


class _Rounds(NamedTuple):
    """Microbatches of which `fit` take turns."""

    task: Task
    way: Way
    stage: int
    fit: int
    drain: Array
    behind: float
    stop: Array

    def follow(self, turns: int, cap: float, takes: Array, effort: int) -> tuple[float, Array, int]:
        """The time by the first `turns` microbatches of each round, or `cap`; and the effort.

        Also the least time of so many microbatches in a row, which holds if there is no `cap`; `takes` is that as far
        as it is known.
        """
        m, i = self.task.num_microbatches, float(self.way.lasts[2 * self.task.num_stages - 1 - self.stage])
        followed = np.array([j for j in range(m) if j % self.fit < turns])
        last = int(followed[-1])
        more = (m - 1 - last) * i  # the I of those behind
        path = _path(self.task, self.way, self.stage, self.fit, turns == self.fit)
        reach = max((self.fit - turns) * float(path.lasts.max()), float(path.after.max()))
        path = path._replace(drain=self.drain, behind=np.inf if self.task.span else self.behind + more, reach=reach)
        near = NEAR * float(path.ahead[0]) / len(path.rank)
        later = np.zeros(len(followed))
        later[: max(0, len(followed) - turns)] = path.again + takes[last + 1 - followed[turns:]]
        room = _make_room(max(64, min(KEYS, effort // 16)), turns, later, self.stop)
        begins = followed * path.lasts[0]
        found = compiled(laps)(path, np.append(followed, m), begins, turns, float(cap - more), near, effort, room)
        if found < 0:
            return 0.0, np.zeros(m + 1), int(room.looked[0])
        slack = near * (len(path.rank) + path.parts) * len(followed)
        ends = np.zeros(m + 1)
        ends[followed + 1] = room.ends
        for count in range(1, m + 1):
            ends[count] = max(ends[count], ends[count - 1] + i)
        return float(found) + more - slack, ends - slack, int(room.looked[0])


def _make_room(keys: int, turns: int, later: Array, stop: Array) -> Room:
    def ints(*size: int) -> Array:
        return np.zeros(size, np.int64)

    return Room(
        ints(2, keys), ints(2, keys), np.zeros((2, keys)), np.zeros((2, keys, KEPT, 2 * turns + 1)), ints(4 * keys),
        ints(turns + 1), np.zeros(turns), ints(turns + 1), np.zeros(turns), np.zeros(2 * turns + 1), np.zeros(1),
        ints(1), stop, np.full(len(later), np.inf), later,
    )  # fmt: skip


def _path(task: Task, way: Way, stage: int, fit: int, every: bool) -> Path:
    """The way that is followed."""
    model, num_stages, last = task.model, task.num_stages, 2 * task.num_stages - 1
    passes = np.arange(stage, last - stage + 1)
    rank, lasts, lag = model.home[passes], way.lasts[passes], way.lag[passes].copy()
    w, kept, parts = float(way.weight[stage]), float(way.stash[stage]), model.parts
    size, room = float(model.needs[stage]), _room(task, stage)
    wait, single = waits(task, way, stage, fit, room), False
    runs_w = wait > 0 and kept >= size and parts == 1
    if runs_w:  # it has to run before the F that would be one too many
        rank, lasts, lag, wait = np.append(rank, rank[0]), np.append(lasts, w), np.append(lag, 0.0), 0.0
    elif every and 0 < kept < size and w > 0:
        single, wait = True, 0.0
    lag[len(passes) - 1] = 0.0
    ahead = np.zeros(len(rank) + 1)
    ahead[: len(passes)] = np.cumsum((lasts + lag)[len(passes) - 1 :: -1])[::-1]
    back, upto, after = _rules(task, way, passes, len(rank)) if every else _rules(task, way, passes[:0], len(rank))
    rest = np.zeros((len(rank) + 1, task.num_ranks))
    for x in range(len(passes) - 1, -1, -1):
        rest[x] = rest[x + 1]
        rest[x, rank[x]] += lasts[x] + (way.weight[last - passes[x]] if passes[x] >= num_stages else 0.0)
    last_f = np.full(task.num_ranks, -1)
    last_f[rank[: num_stages - stage]] = np.arange(num_stages - stage)  # the last of equal ones stays
    again = wait + (w if runs_w else 0.0)
    return Path(
        rank,
        lasts,
        lag,
        len(passes),
        ahead,
        again,
        back,
        upto,
        after,
        wait,
        parts if single else 0,
        w / parts,
        kept / parts if single else 0.0,
        size if single else 0.0,
        room,
        rest,
        np.zeros(0),
        last_f,
        0.0,
        0.0,
    )


def _rules(task: Task, way: Way, passes: Array, length: int) -> tuple[Array, Array, Array]:
    """What memory asks for before an F, at most two rules: how far back, upto which action, how long ago."""
    model, last = task.model, 2 * task.num_stages - 1
    back, upto, after = np.full((2, length), 1 << 30), np.zeros((2, length), np.int64), np.zeros((2, length))
    for x in range(len(passes) // 2):
        rank = model.home[passes[x]]
        mine = [one for one in passes[: x + 1] if model.home[one] == rank]  # the same rank's stages so far
        behind = [one for one in passes[x + 1 : len(passes) // 2] if model.home[one] == rank]
        room, sizes = float(model.limit[rank]), model.needs[mine]
        left, first = room - float(sizes.sum()), float(sizes[0])
        if x and left >= 0 and first > 0:  # others have their first stage alive until its I
            back[0, x], upto[0, x] = int(left / first) + 1, last - mine[0] - passes[0] + 1
            after[0, x] = waits(task, way, mine[0], int(back[0, x]), left + first)
        if len(mine) > 1 and sizes.sum() > 0:  # or all stages so far, until the I of the last of them
            back[1, x], upto[1, x] = int(room / float(sizes.sum())), last - mine[-1] - passes[0] + 1
        elif behind and float(model.needs[behind[-1]]) > room - int(room / first) * first:
            # where all memory is taken by first stages, the oldest is through its last stage, or it could never go on
            back[1, x], upto[1, x] = int(room / first) - 1, last - behind[-1] - passes[0] + 1
            if float(model.needs[behind[-1]]) == first:
                again = waits(task, way, behind[-1], int(room / first), room)
                after[1, x] = min(again, float(way.lasts[last - mine[0]]))
    back[back <= 0] = 1 << 30
    return back, upto, after


def waits(task: Task, way: Way, stage: int, fit: int, room: float) -> float:
    """From the end of a stage's I to the begin of the F whose activation is one too many while this one is alive.

    Where the I does not make enough room by itself, parts of its W run, or the I of the microbatch behind it.
    """
    size, kept, parts = float(task.model.needs[stage]), float(way.stash[stage]), task.model.parts
    over = fit * size + kept - room
    if over <= 0:
        return 0.0
    i = float(way.lasts[2 * task.num_stages - 1 - stage])
    pieces = ceil(over / kept * parts - 1e-9) * float(way.weight[stage]) / parts
    return pieces if kept >= size else min(pieces, i + (0.0 if over <= size - kept else min(pieces, i)))
