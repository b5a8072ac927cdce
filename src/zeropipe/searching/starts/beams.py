"""Starts of a search for little memory: many schedules grow side by side, and the best go on (growing.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import NamedTuple, TypeVar

import numpy as np

from zeropipe.core.jit import compiled
from zeropipe.searching.bound.bound import all_ranks
from zeropipe.searching.climb import walked
from zeropipe.searching.judge import Judge, Start
from zeropipe.searching.model import Array, Task, alone
from zeropipe.searching.starts.growing import grow
from zeropipe.searching.starts.patterns import shortest_period
from zeropipe.searching.starts.rules import most_alive
from zeropipe.searching.starts.scarce import of_the_scarcest

NEAR = 1e-9  # of a mean pass: so near is equal
NARROW = 8  # schedules side by side at first
PARTS, SOFT = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5), (1.0, 5.0)
ALIVE = ((1.0, 0), (1.0, 1), (1.2, 0), (1.35, 1), (1.5, 0), (2.0, 0))  # times what is alive on the way, and more
BEST, CHANGED = 4, 8  # settings that are tried again with twice the width, and changed ones
SOFTER, SHARES = 0.15, 0.4  # of all changes: up to SOFTER the softness, up to SHARES the shares, else caps
WALK, FURTHER = 11, 64  # times the width: steps from the end of each beam, and of the BEST ones; half of all the time
HOPELESS = 1.1  # times the best: what cannot end before is given up
SCARCE = 0.7  # of the longest time that a rank's memory is needed for: others do not count
EACH = 12  # ways to go on that are noted for each schedule, in the mean

Job = TypeVar("Job")
Done = TypeVar("Done")


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
    stays: Array  # memory of the scarce ranks that a microbatch needs from a pass on, times how long, as part of all
    holds: Array  # and the part of it that it holds before the pass
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
    group: Array  # the name of each schedule's group
    member: Array  # of each way to go on: its group, by name and then by place ...
    taken: Array  # ... where stand how many of it go on ...
    groups: Array  # ... and its name
    put_off: Array  # ways that are taken where places are left
    stop: Array


def field_of(task: Task) -> Field:
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
        every.alone, every.rest, *of_the_scarcest(task, SCARCE), name,
    )  # fmt: skip


def bed_of(field: Field, width: int, stop: Array) -> Bed:
    """Room for so many schedules; `stop[0] = 1` ends their growth."""

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
        ints(2, width), ints(size), ints(2 * size + 1), ints(2 * size + 1), ints(size), stop,
    )  # fmt: skip


class Setting(NamedTuple):
    """How schedules grow (see growing.grow)."""

    soft: float
    scarce: float
    share: Array
    most: Array
    apart: Array

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
    """Several caps on all but the last stage of each rank: parts of what fits, and by how long microbatches stay."""
    fit, one = most_alive(task), task.problem.stages_per_rank == 1
    caps = [np.floor(fit * part) for part in ((1.0,) if one else PARTS)]
    caps += [np.ceil(times * alive_on_the_way(task) + more) for times, more in ALIVE]
    ends = [task.placement.stages_of(rank)[-1] for rank in range(task.num_ranks)]
    for number, (cap, soft) in enumerate(product(caps, SOFT)):
        most = np.clip(cap, 1, fit).astype(np.int64)
        if not one:
            most[ends] = fit[ends].astype(np.int64)
        for share in (0.5, 0.0, 1.0) if one and number < len(SOFT) else (0.5,):
            yield Setting(soft, 0.0, np.full(task.num_ranks, share), most, np.zeros(2 * task.num_stages, np.int64))


def alive_on_the_way(task: Task) -> Array:
    """Activations of each stage, were the memory of the tightest rank always full and no microbatch ever waited."""
    period, begin, stages = shortest_period(task), alone(task.model), np.arange(task.num_stages)
    last = 2 * task.num_stages - 1 - stages
    stays: Array = begin[last] + task.model.lasts[last] - begin[stages]
    return stays / period if period > 0 else np.full(task.num_stages, float(task.num_microbatches))


def beamed(task: Task, value: float, seed: int, workers: int = 1) -> Iterator[tuple[int, Start | None]]:
    """The width of one beam after the other, and the start it leads to: settings that did best are changed and widened.

    Behind them come longer walks from the best ends, with width 0. `value` is what is known already; what is far above
    it is given up. The workers share the work, and change nothing else.
    """
    field, random = field_of(task), np.random.default_rng(seed)
    width, tries = NARROW, list(first_settings(task))
    while True:
        beams = _Beams(task, field, width, value * HOPELESS, min(workers, len(tries)))
        reached: list[tuple[Start, Setting]] = []
        jobs = [(setting, _number(random)) for setting in tries]
        for (setting, _), start in zip(jobs, _shared(beams.grown, jobs, workers)):
            if start is not None:
                reached.append((start, setting))
            yield width, start
        reached = sorted(reached, key=lambda one: one[0].value)[:BEST]
        for start in _shared(beams.further, [(start, _number(random)) for start, _ in reached], workers):
            value = min(value, start.value)
            yield 0, start
        width *= 2
        again = [setting for _, setting in reached] or list(first_settings(task))
        tries = again + [again[k % len(again)].changed(task, random) for k in range(CHANGED)]


def grown(task: Task, field: Field, cap: float, width: int, setting: Setting, bed: Bed) -> Start | None:
    """What a setting leads to, if that ends before the cap."""
    if not compiled(grow)(field, cap, width, *setting, bed):
        return None
    rows = rows_of(task, way_back(bed.chosen, bed.parent))
    return Judge(task).play(rows, setting.share)


class _Beams:
    """Those of one width, each worker with its own bed."""

    def __init__(self, task: Task, field: Field, width: int, cap: float, count: int) -> None:
        self._task, self._field, self._width, self._cap = task, field, width, cap
        self._beds = [bed_of(field, width, np.zeros(1, np.int64)) for _ in range(count)]

    def grown(self, worker: int, job: tuple[Setting, int]) -> Start | None:
        """What a setting leads to, if that ends before the cap, with a short walk behind it."""
        setting, number = job
        start = grown(self._task, self._field, self._cap, self._width, setting, self._beds[worker])
        return start and self._walked(start, WALK, number)

    def further(self, worker: int, job: tuple[Start, int]) -> Start:
        """What a long walk leads to."""
        return self._walked(job[0], FURTHER, job[1])

    def _walked(self, start: Start, times: int, number: int) -> Start:
        return walked(self._task, start, times * self._width, number, 0.0, np.zeros(1, np.int64))


def way_back(chosen: Array, parent: Array) -> Array:
    """The passes that led to the best schedule, from what each layer's chose and which ones they grew from."""
    passes, one = np.zeros(len(chosen), np.int64), 0
    for layer in range(len(passes) - 1, -1, -1):
        passes[layer], one = chosen[layer, one], parent[layer, one]
    return passes


def rows_of(task: Task, passes: Array) -> Array:
    """Passes in the order in which they begin, rank by rank."""
    return np.concatenate([passes[task.model.home[passes] == rank] for rank in range(task.num_ranks)])


def _number(random: np.random.Generator) -> int:
    """Of a walk."""
    return 1 + 7919 * int(random.integers(1 << 40))


def _shared(work: Callable[[int, Job], Done], jobs: list[Job], workers: int) -> Iterator[Done]:
    """What comes of the jobs, in their order; as many at a time as there are workers."""
    with ThreadPoolExecutor(workers) as threads:
        for low in range(0, len(jobs), workers):
            yield from threads.map(work, range(workers), jobs[low : low + workers])
