"""How long it takes if only a few ranks do one thing at a time and have a memory limit (ordering.py)."""

from __future__ import annotations

from itertools import pairwise
from math import ceil
from typing import NamedTuple

import numpy as np

from zeropipe.core.jit import compiled
from zeropipe.searching.bound.ordering import order
from zeropipe.searching.bound.owed import Owed, owed_of
from zeropipe.searching.bound.way import Way, blocked_after
from zeropipe.searching.kernels import FAR
from zeropipe.searching.model import Array, Task

NEAR = 1e-11  # of a microbatch's way, for all its passes together: so near is equal
FIRST = 0.001  # above the best bound so far: whether anything ends before that is asked first
GROWTH = 2.0  # of that with each answer
SHARE = 1_000  # of the effort for a set of ranks at first
KEPT = 8  # states that have come equally far at first; twice as many where that was done with its share ...
FEWER = 4  # ... and so many times fewer where it was not
MORE = 4  # of the effort with each round
DIVE = 32  # looks at passes of one order count as one state
OFTEN = 16  # at most so often a rank is asked how long it takes for fewer microbatches ...
PART = 8  # ... each time by such a part of the share ...
KEPT_ALONE = 64  # ... with so many states that have come equally far
FEWEST = 64  # states that there is place for at least
ANY = 1 << 62  # effort: as much as it takes
CELLS = 4_000_000  # numbers in all states


class Few(NamedTuple):
    """The passes of some ranks along a microbatch's way, F of all their stages and then I in turn."""

    num_microbatches: int
    rank: Array  # of each pass: which of the few it is
    lasts: Array
    lag: Array  # from its end to the begin of the next one, over the ranks that are left out
    every: Array  # from the arrival of a microbatch there to that of the one behind it
    begins: Array  # when each microbatch can begin at the earliest
    work: Array  # a pass and its W
    weight: Array  # W of each stage
    takes: Array  # memory of an activation of each stage
    keeps: Array  # and what W keeps of it
    rest: Array  # the least time from the begin of a pass of a microbatch to the end of everything
    room: Array  # memory of each rank
    piece_keeps: Array  # the most that a part of a W frees
    piece_lasts: Array  # the shortest such part
    per_room: Array  # the least time of W for what they free
    drain: Array  # what comes on top of a rank's work behind its last F ...
    began: Array  # when its span began, where spans count
    last_f: Array  # ... which is this pass
    ample: Array  # there is room for everything
    alone: Array  # no F takes the room of another stage's F
    first: Array  # where the stages of each rank begin ...
    stages: Array  # ... rank by rank
    name: Array  # numbers by chance: their sums tell counts apart, nearly always
    near: float  # times that differ by so much are equal
    parts: int  # of a W
    owed: Owed  # where W are whole: which of them can be owed


class Place(NamedTuple):
    """For the kernel to work in: two layers of counts, each with some states."""

    counts: Array
    names: Array  # numbers that tell counts apart, nearly always
    first: Array  # of the states that have these counts
    after: Array  # and which follows each
    states: Array
    table: Array
    slots: Array  # the places in the table that are taken
    ready: Array  # two choices for each pass: when it would begin ...
    ends: Array  # ... and when the W before it would end if it never did
    beside: Array  # how much memory is left for W that are owed when it begins
    given: Array  # how many parts of W there were of each kind
    least_begin: Array
    kid: Array  # the counts that follow by each pass
    new: Array
    ahead: Array  # the next pass of each microbatch that is under way
    left: Array
    level: Array
    kept: Array
    behind: Array
    looked: Array
    whole: Array
    merged: Array
    rating: Array  # where only the best go on: of each state ...
    ratings: Array  # ... and of all
    stop: Array


class Limits(NamedTuple):
    """What is known of one rank, where W may be interrupted by passes."""

    drain: float  # what comes on top of its work behind its last F
    takes: Array  # the least time of so many microbatches from its first F to the end of everything
    fits: int  # so many activations of its first stage fit into its memory
    wait: float  # from the I of one to the F for which there was no room


class Asked:
    """What is known of sets of ranks, the better the more often it is asked."""

    def __init__(self, task: Task, way: Way, limits: list[Limits], stop: Array) -> None:
        self._task, self._way, self._limits, self._stop = task, way, list(limits), stop
        self._share = SHARE
        self._values: dict[tuple[int, ...], float] = {}  # the most that each set is known to give
        self._looked: dict[tuple[int, ...], int] = {}  # how many states that took
        self._known: set[tuple[int, ...]] = set()  # those that were followed to their end
        self._kept: dict[tuple[int, ...], int] = {}  # states of each that have come equally far
        self._done: set[tuple[int, ...]] = set()  # those that give no more with more effort
        self._settled: set[tuple[int, int]] = set()  # ranks and fewer microbatches that were followed to their end
        self._again: dict[tuple[int, ...], int] = {}  # those that gave no more: the share from which on to ask again

    def by_few(self, best: float, cap: float, effort: int) -> float:
        """A bound that is at least `best` and at most `cap`: by single ranks, then by more and more together.

        Each set of ranks gets a share of the effort, and once all have had it a larger one. The more states are kept
        apart the better, if the share suffices to follow them to their end.
        """
        task = self._task
        begins = self._way.head[task.first_stages] * (not task.span)
        alone = [float(known.takes[-1]) + begin for known, begin in zip(self._limits, begins)]
        while best < cap and effort > 0 and not self._stop[0]:
            before = effort
            chosen: tuple[int, ...] = ()
            while len(chosen) < task.num_ranks:
                promise = {}  # the value, and of equal ones how much there was to look at
                sets = [tuple(sorted({*chosen, rank})) for rank in range(task.num_ranks) if rank not in chosen]
                for few in sorted(sets, key=lambda few: -self._values.get(few, np.inf)):
                    had = effort
                    best, effort = self._ask(few, best, cap, effort)
                    self._looked[few] = max(self._looked.get(few, 0), had - effort)
                    value = max(self._values[few], alone[few[0]] if len(few) == 1 else 0.0)
                    promise[few] = round(value / best, 6) if best else value, self._looked[few]
                    if best >= cap or effort <= 0:
                        return best
                chosen = max(promise, key=lambda few: promise[few])
                if chosen not in self._known:  # more of them would not be known either
                    break
                if len(chosen) == 1:
                    effort = self._fewer(chosen[0], effort)
            if effort == before and self._share >= max(self._again.values(), default=0):
                break
            self._share = min(ANY, MORE * self._share)
        return best

    def _ask(self, ranks: tuple[int, ...], best: float, cap: float, effort: int) -> tuple[float, int]:
        """The best bound with these ranks, each time that is asked for by a share of the effort; and what is left."""
        share = self._share
        if ranks in self._done or share < self._again.get(ranks, 0):
            return best, effort
        self._again.pop(ranks, None)
        task, few = self._task, few_of(self._task, self._way, self._limits, ranks)
        blocked = blocked_after(task)
        place = _place(few, max(FEWEST, share), self._stop)
        slack = few.near * len(few.rank) * task.num_microbatches
        # the end in one order: no bound by these ranks is above that
        value = compiled(order)(few, FAR, 1, ANY, 1, place) - blocked - slack
        effort -= len(few.rank) ** 2 * task.num_microbatches // DIVE
        if value <= best:  # more is not asked for
            self._values[ranks] = value
            self._done.add(ranks)
            self._known.add(ranks)
            return best, effort
        step, value, kept = FIRST, 0.0, self._kept.get(ranks, KEPT)
        while effort > 0 and best < cap and not self._stop[0]:
            wish, most = min(cap, best * (1 + step)), min(share, effort)
            found = compiled(order)(few, wish + blocked + slack, kept, most, 0, place) - blocked - slack
            effort -= int(place.looked[0])
            value = max(value, min(float(found), cap))
            best = max(best, value)
            if found < wish * (1 - 1e-12):
                if place.whole[0]:
                    self._known.add(ranks)
                    if not place.merged[0]:
                        self._done.add(ranks)
                        break
                    kept *= 2
                    self._kept[ranks] = kept
                    if 2 * int(place.looked[0]) <= share:
                        step = FIRST
                        continue
                elif step > FIRST:  # that was too much at once
                    step = FIRST
                    continue
                else:
                    self._kept[ranks] = max(1, kept // FEWER)
                break
            step *= GROWTH
        if ranks in self._known - self._done and value <= self._values.get(ranks, 0.0) and value < best:
            self._again[ranks] = min(ANY, share * MORE**4)
        self._values[ranks] = max(self._values.get(ranks, 0.0), value)
        return best, effort

    def _fewer(self, rank: int, effort: int) -> int:
        """Learn how long a rank takes for fewer microbatches, by its best order; and say how much effort is left.

        All of them may have arrived before.
        """
        task, m, share = self._task, self._task.num_microbatches, min(effort, self._share // PART)
        begins = float(self._way.head[task.first_stages[rank]]) * (not task.span)
        takes = self._limits[rank].takes.copy()
        for n in range(m - 1, 0, -max(1, ceil(m / OFTEN)))[::-1]:
            if effort <= 0 or self._stop[0]:
                break
            if (rank, n) in self._settled:
                continue
            few = few_of(task, self._way, self._limits, (rank,), n)
            slack, place = few.near * len(few.rank) * n, _place(few, max(FEWEST, share), self._stop)
            step, value, left = FIRST, begins + float(takes[n]), share
            while left > 0:
                wish = value * (1 + step)
                found = float(compiled(order)(few, wish + slack, KEPT_ALONE, left, 0, place)) - slack
                effort, left = effort - int(place.looked[0]), left - int(place.looked[0])
                value, step = max(value, found), step * GROWTH
                if found < wish * (1 - 1e-12):
                    if place.whole[0]:
                        self._settled.add((rank, n))
                    break
            takes[n:] = np.maximum(takes[n:], value - begins)
            self._limits[rank] = self._limits[rank]._replace(takes=takes)
        return effort


def _place(few: Few, most: int, stop: Array) -> Place:
    """Room for `most` states of a layer, or as many as there may be."""

    def ints(*size: int) -> Array:
        return np.zeros(size, np.int64)

    passes, m = len(few.rank), few.num_microbatches
    fits = few.room[few.rank[0]] / few.takes[0] if few.takes[0] > 0 else np.inf
    long = min(m, int(min(fits, 1e9)) + 1) + 2 * len(few.room)
    kinds = int(few.owed.kind_first[-1]) + few.owed.parts.shape[1]  # some ranks have fewer than others
    size = min(most, CELLS // (2 * long))
    return Place(
        ints(2, size, passes), ints(2, size), ints(2, size), ints(2, size), np.zeros((2, size, long)), ints(2 * size),
        ints(size), np.zeros(2 * passes), np.zeros(2 * passes), np.zeros(passes), ints(kinds), np.zeros(passes),
        ints(passes), np.zeros(long), ints(long), np.zeros(long), np.zeros(long), np.zeros(long), np.zeros(long),
        ints(1), ints(1), ints(1), np.zeros((2, size)), np.zeros(size), stop,
    )  # fmt: skip


def few_of(task: Task, way: Way, limits: list[Limits], ranks: tuple[int, ...], fewer: int = 0) -> Few:
    """What is known of some ranks; for `fewer` microbatches: as if they had all arrived at once."""
    model, m, parts = task.model, fewer or task.num_microbatches, task.model.parts
    passes = np.flatnonzero(np.isin(model.home, ranks))
    stages = passes[: len(passes) // 2]
    rank = np.searchsorted(ranks, model.home[passes])
    lasts = way.lasts[passes]
    lag = np.append(way.head[passes[1:]] - way.head[passes[:-1]] - lasts[:-1], 0.0)
    holds = model.holds * task.serial

    def between(begin: int, end: int) -> float:
        """From the arrival of a microbatch on its way from one pass to another to that of the one behind it."""
        return float(max(way.lasts[begin + 1 : end].max(initial=0.0), holds[max(begin, 0) : end].max(initial=0.0)))

    every = np.array([*(between(int(x), int(y)) for x, y in pairwise(passes)), 0.0])
    begins = float(way.head[stages[0]]) + np.arange(m) * (0.0 if fewer else between(-1, int(stages[0])))
    weight, takes, keeps = way.weight[stages], model.needs[stages], way.stash[stages]
    work = lasts + np.concatenate([np.zeros(len(stages)), weight[::-1]])
    own = [np.flatnonzero(rank[: len(stages)] == one) for one in range(len(ranks))]
    room = model.limit[list(ranks)]
    ample = np.array([m * float((takes[mine]).sum()) <= space for mine, space in zip(own, room)])
    frees = [mine[keeps[mine] > 0] for mine in own]
    whole = [task.plain and not enough for enough in ample.tolist()]
    began = np.array([way.head[task.first_stages[one]] if task.span else 0.0 for one in ranks])
    return Few(
        m, rank, lasts, lag, every, begins, work, weight, takes, keeps, _rest(task, way, limits, passes, ranks, m),
        np.minimum(room, 1e290),
        np.array([float(keeps[some].max(initial=0.0)) / parts or 1.0 for some in frees]),
        np.array([float(weight[some].min(initial=np.inf)) / parts if len(some) else 0.0 for some in frees]),
        np.array([float((weight[some] / keeps[some]).min()) if len(some) else 0.0 for some in frees]),
        np.array([limits[one].drain for one in ranks]), began, np.array([mine[-1] for mine in own]),
        ample, ample | np.array([len(mine) == 1 for mine in own]),
        np.cumsum([0, *map(len, own)]), np.concatenate(own),
        np.random.default_rng(1).integers(1 << 40, 1 << 50, len(passes)), NEAR * float(way.head[-1]) / len(passes),
        parts, owed_of(weight, keeps, own, room, whole, parts, m),
    )  # fmt: skip


def _rest(task: Task, way: Way, limits: list[Limits], passes: Array, ranks: tuple[int, ...], m: int) -> Array:
    """Of each pass and each of m microbatches: the least time from its begin to the end of everything.

    The last microbatch runs each pass behind the others. Those that have not begun on a rank take their time there, and
    so do those that wait for the room of this one.
    """
    num_stages, head, lasts = task.num_stages, way.head, way.lasts
    last, number, firsts = 2 * num_stages - 1, np.arange(m), np.array(task.first_stages)
    tail, began = way.tail, np.zeros(task.num_ranks)
    if task.span:  # it began with each rank's first F
        began = head[firsts]
        ends = (head + lasts)[: num_stages - 1 : -1] + way.weight - began[task.model.home[:num_stages]]
        tail = np.maximum.accumulate(np.append(ends, np.full(num_stages, ends.min())))[::-1] - head
    rest = np.zeros((len(passes), m))
    for at, x in enumerate(passes):
        behind = (m - 1 - number)[:, None] * lasts[x:] + head[x:] - head[x] + tail[x:]
        rest[at] = behind.max(axis=1)
        for rank in ranks:
            known, a = limits[rank], firsts[rank]
            if a >= x:
                rest[at] = np.maximum(rest[at], head[a] - head[x] + known.takes[m - number] - began[rank])
            if last - a >= x and known.fits < m:
                back = head[last - a] + lasts[last - a] - head[x] + known.wait - began[rank]
                some = number[: m - known.fits]
                rest[at, some] = np.maximum(rest[at, some], back + known.takes[m - known.fits - some])
    return rest
