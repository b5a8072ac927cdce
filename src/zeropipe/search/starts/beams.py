"""Starts of a search for little memory: many schedules grow side by side, and the best go on (growing.py)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import numpy as np

from zeropipe.core.jit import compiled
from zeropipe.search.bound.bound import all_ranks
from zeropipe.search.climb import walked
from zeropipe.search.judge import Judge, Start
from zeropipe.search.model import Array, Task
from zeropipe.search.starts.growing import grow
from zeropipe.search.starts.rules import most_alive

NEAR = 1e-9  # of a mean pass: so near is equal
NARROW = 8  # schedules side by side at first
PARTS, SOFT = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5), (1.0, 5.0)
BEST, CHANGED = 4, 8  # settings that are tried again with twice the width, and changed ones
SOFTER, SHARES = 0.15, 0.4  # of all changes: up to SOFTER the softness, up to SHARES the shares, else caps
WALK = 75  # times the width: steps from the end of each beam, some of its own time
HOPELESS = 1.1  # times the best: what cannot end before is given up
EACH = 12  # ways to go on that are noted for each schedule, in the mean


class Field(NamedTuple):
    """What the kernel needs to know of a task."""

    num_microbatches: int
    parts: int
    near: float
    rank: Array  # of each pass
    lasts: Array
    lag: Array
    needs: Array  # memory that a pass takes
    weight: Array  # a part of a W of each stage
    frees: Array  # and the memory that it frees
    limit: Array  # memory of each rank
    first: Array  # where the stages of each rank begin ...
    stages: Array  # ... rank by rank
    total: Array  # the work of each rank, less what its span began later
    drain: Array  # what comes on top of its work behind its last F ...
    last_f: Array  # ... which is this pass
    ample: Array  # there is room for everything
    alone: Array  # no F takes the room of another stage's F
    rest: Array  # the least time from the begin of a pass of a microbatch to the end of everything
    name: Array  # numbers by chance: their sums tell which passes have run


class Bed(NamedTuple):
    """Where they grow: two layers, what each may go on with, and the way back."""

    counts: Array
    ahead: Array  # the next pass of each microbatch that is under way
    done: Array  # parts of W of each stage
    times: Array  # arrivals, the end and the waits of each rank, the last begin, the memory and the owed W of each rank
    names: Array
    table: Array
    spare: Array
    begins: Array  # of a schedule and a pass: when it can begin ...
    then: Array  # ... and then the memory of its rank, how long that has waited, and the W that it owes
    runs: Array  # parts of W that run before the pass
    heap: Array
    rating: Array  # of each way to go on
    origin: Array  # of which schedule
    choice: Array  # by which pass
    what: Array  # its begin and what `then` has of it
    many: Array  # parts of W before it
    parent: Array
    chosen: Array


def _field(task: Task) -> Field:
    model, m, half, every = task.model, task.num_microbatches, task.num_stages, all_ranks(task)
    total = np.bincount(every.rank, every.work * m, task.num_ranks)
    lasts, lag = model.lasts, model.lag
    if model.blocks:
        lasts, lag = lasts + lag, np.zeros_like(lag)
    stages = np.argsort(model.home[:half], kind="stable")
    first = np.concatenate([[0], np.cumsum(np.bincount(model.home[:half], minlength=task.num_ranks))])
    name = np.random.default_rng(1).integers(1 << 40, 1 << 50, 2 * half)
    return Field(
        m, model.parts, NEAR * float(lasts.mean()), model.home, lasts, lag, model.needs, model.weight, model.frees,
        np.minimum(model.limit, 1e290), first, stages, total - every.began, every.drain, every.last_f, every.ample,
        every.alone, every.rest, name,
    )  # fmt: skip


def _bed(field: Field, width: int) -> Bed:
    def ints(*size: int) -> Array:
        return np.zeros(size, np.int64)

    passes, p, m = len(field.rank), len(field.limit), field.num_microbatches
    takes = float(field.needs[0])
    window = m if takes <= 0 else int(min(m, field.limit[field.rank[0]] / takes + 1))
    size = EACH * width
    return Bed(
        ints(2, width, passes), ints(2, width, window), ints(2, width, passes // 2),
        np.zeros((2, width, window + 4 * p + 1)), ints(2, width), ints(2 * width + 1), ints(passes // 2),
        np.zeros(passes), np.zeros((passes, 3)), ints(passes),
        ints(size), np.zeros(size), ints(size), ints(size), np.zeros((size, 4)), ints(size),
        np.zeros((passes * m, width), np.int32), np.zeros((passes * m, width), np.int16),
    )  # fmt: skip


class Setting(NamedTuple):
    """How schedules grow (see growing.grow)."""

    soft: float
    share: Array
    most: Array

    def changed(self, task: Task, random: np.random.Generator) -> Setting:
        """Another one near it: the same change on some ranks in a line."""
        low = int(random.integers(task.num_ranks))
        high = low + 1 + int(random.integers(task.num_ranks - low)) * int(random.integers(2))
        what, share, most = random.random(), self.share.copy(), self.most.copy()
        if what < SOFTER:
            return self._replace(soft=self.soft * float(random.choice((0.4, 2.5))))
        if what < SHARES:
            share[low:high] = random.choice((0.0, 0.25, 0.5, 0.75, 1.0))
            return self._replace(share=share)
        slot, more = int(random.integers(task.problem.stages_per_rank)), int(random.choice((-2, -1, -1, 1, 1, 2)))
        stages = [task.placement.stages_of(rank)[slot] for rank in range(low, high)]
        most[stages] = np.clip(most[stages] + more, 1, most_alive(task)[stages])
        return self._replace(most=most)


def first_settings(task: Task) -> Iterator[Setting]:
    """Several caps on all but the last stage of each rank."""
    fit, alone = most_alive(task), task.problem.stages_per_rank == 1
    for part, soft in product((1.0,) if alone else PARTS, SOFT):
        most = np.maximum(1, np.floor(fit * part)).astype(np.int64)
        if not alone:
            ends = [task.placement.stages_of(rank)[-1] for rank in range(task.num_ranks)]
            most[ends] = fit[ends]
        for share in (0.5,) if not alone else (0.5, 0.0, 1.0):
            yield Setting(soft, np.full(task.num_ranks, share), most)


def beamed(task: Task, value: float, seed: int) -> Iterator[tuple[int, Start | None]]:
    """The width of one beam after the other, and the start it leads to: settings that did best are changed and widened.

    `value` is what is known already; what is far above it is given up.
    """
    judge, field, random = Judge(task), _field(task), np.random.default_rng(seed)
    reached: list[tuple[float, int, Setting]] = []
    width, tries = NARROW, list(first_settings(task))
    while True:
        bed = _bed(field, width)
        for setting in tries:
            rows = _grown(task, field, bed, min([value, *(one[0] for one in reached)]) * HOPELESS, width, setting)
            start = None if rows is None else judge.play(rows, setting.share)
            if start is not None:
                start = walked(
                    task, start, WALK * width, 1 + 7919 * int(random.integers(1 << 40)), 0.0, np.zeros(1, np.int64)
                )
                reached.append((start.value, -len(reached), setting))
            yield width, start
        reached = sorted(reached, key=lambda one: one[:2])[:BEST]
        width *= 2
        again = [setting for _, _, setting in reached] or list(first_settings(task))
        tries = again + [again[k % len(again)].changed(task, random) for k in range(CHANGED)]
        reached = []


def _grown(task: Task, field: Field, bed: Bed, cap: float, width: int, setting: Setting) -> Array | None:
    """The rows of the best schedule that has grown, if one ends before `cap`."""
    if not compiled(grow)(field, cap, width, setting.soft, setting.share, setting.most, bed):
        return None
    passes, one = np.zeros(len(bed.parent), np.int64), 0
    for layer in range(len(passes) - 1, -1, -1):
        passes[layer], one = bed.chosen[layer, one], bed.parent[layer, one]
    return np.concatenate([passes[field.rank[passes] == rank] for rank in range(task.num_ranks)])
