"""Starts of a search in which every microbatch does the same, one period after the one before it (rings.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from zeropipe.core.jit import compiled
from zeropipe.searching.judge import Judge, Start
from zeropipe.searching.model import Array, Task, alone
from zeropipe.searching.starts.rings import anneal

STEPS, EACH = 12_000, 750  # of annealing: at least, and for each stage; 20 ms at 8 ranks with two stages each
EFFORT = 8_000_000  # fewer steps where steps x stages x stages per rank would be more: then each of them takes longer
HEAT = 0.01  # of the memory of a rank: what a step may lose at the begin
TRIES, MORE = 2, 3  # for each period, and where one of these finds something
LONGER = (0.0, 0.01, 0.02, 0.035)  # than the shortest period that may be possible
PERIODS = 2  # at which something is found; then longer ones are not tried
BREAKS = 2  # parts into which the idle time of a ring is cut
LEAST, MOST = 1e-300, 1e300  # memory: neither none at all nor without limit, so that parts of it can be told


class Cycle(NamedTuple):
    """What the kernel needs to know. Actions are numbered: the passes, then each stage's W; behind them idle time."""

    period: float
    lasts: Array
    lag: Array  # from the end of the action that is needed to the begin
    before: Array  # the action that is needed
    begin: Array  # where each rank's ring begins
    stages: Array  # of each rank, rank by rank
    first: Array  # where those of each rank begin
    size: Array  # memory of an activation
    keeps: Array  # and what of it is kept from I to W
    limit: Array


class Pattern(NamedTuple):
    """One microbatch's way: when each pass begins. The next microbatch goes it one period later."""

    period: float
    at: Array

    def rows(self, task: Task) -> Array:
        """The rows for all microbatches of a task. What waits in warm-up and drain moves up when they are played."""
        m, rows = task.num_microbatches, []
        for passes in task.passes_by_rank:
            begins = self.at[passes, None] + self.period * np.arange(m)
            rows.append(np.repeat(passes, m)[np.argsort(begins.ravel(), kind="stable")])
        return np.concatenate(rows)


def shortest_period(task: Task) -> float:
    """No pattern has a shorter one: by the work of a rank for a microbatch, and by how long its activations stay."""
    lasts, _, home = _actions(task)
    stages = np.arange(task.num_stages)
    i, w = 2 * task.num_stages - 1 - stages, 2 * task.num_stages + stages
    begin = _alone(task)
    stays = task.model.needs[stages] * (begin[w] - begin[stages]) + _keeps(task) * lasts[w]
    held = np.bincount(home[i], stays, task.num_ranks)
    return float(max(np.bincount(home, lasts).max(), (held / _limit(task)).max()))


def find(task: Task, period: float, number: int, steps: int | None = None) -> list[Pattern]:
    """Patterns that fit into memory, if some were found; another number looks elsewhere."""
    num_stages = task.num_stages
    cycle, ring, turn = _cycle(task, period)
    at, kept, found = np.zeros(3 * num_stages), np.zeros(3 * num_stages), np.zeros((2, 3 * num_stages))
    spot, state = np.zeros(len(cycle.lasts)), np.array([number * 7919 + 13], np.int64)
    if steps is None:
        steps = min(max(STEPS, EACH * num_stages), EFFORT // (num_stages * task.problem.stages_per_rank))
    fits = compiled(anneal)(cycle, steps, HEAT, state, ring, turn, spot, at, kept, turn.copy(), found)
    return [Pattern(period, times[: 2 * num_stages]) for times in found] if fits else []


def repeating(task: Task, enough: float, stopped: Callable[[], bool] = lambda: False) -> Iterator[Start]:
    """Starts from patterns of the shortest periods at which some are found.

    With one stage per rank there are none: where memory is short, what repeats there are several microbatches, and the
    rules of the dispatch find it. Periods that are too long for a makespan below `enough` are left out.
    """
    judge, shortest, found = Judge(task), shortest_period(task), 0
    if task.problem.stages_per_rank == 1 or shortest <= 0:
        return
    for longer in LONGER:
        period = shortest * (1 + longer)
        if found == PERIODS or task.num_microbatches * period >= enough:
            return
        some, number = False, 0
        while number < (TRIES + MORE if some else TRIES) and not stopped():
            for pattern in find(task, period, number):
                start = judge.plays(pattern.rows(task))
                if start is not None:
                    some = True
                    yield start
            number += 1
        found += some


def _cycle(task: Task, period: float) -> tuple[Cycle, Array, Array]:
    """What is known, and rings to begin with, with where each of them begins: as if microbatches never met."""
    num_stages, p = task.num_stages, task.num_ranks
    lasts, lag, home = _actions(task)
    ideal, times, rings, turn = _alone(task) % period, list(lasts), [], np.zeros(p)
    for rank in range(p):
        ring = np.flatnonzero(home == rank)
        ring = ring[np.argsort(ideal[ring], kind="stable")]
        turn[rank] = ideal[ring[0]]
        free = period - float(lasts[ring].sum())
        if free > 1e-9 * period:
            ring = np.insert(ring, np.linspace(1, len(ring), BREAKS).astype(int), len(times) + np.arange(BREAKS))
            times += [free / BREAKS] * BREAKS
        rings.append(ring)
    before = np.concatenate([[0], np.arange(2 * num_stages - 1), 2 * num_stages - 1 - np.arange(num_stages)])
    stages = np.argsort(home[:num_stages], kind="stable")
    first = _begins(np.bincount(home[:num_stages], minlength=p))
    begin = _begins(np.array([len(ring) for ring in rings]))
    size, keeps, limit = task.model.needs[:num_stages], _keeps(task), _limit(task)
    cycle = Cycle(period, np.array(times), lag, before, begin, stages, first, size, keeps, limit)
    return cycle, np.concatenate(rings), turn


def _actions(task: Task) -> tuple[Array, Array, Array]:
    """Of each pass and each W: how long it takes, the lag before it, its rank."""
    model, num_stages = task.model, task.num_stages
    lasts, lag = model.lasts, model.lag
    if model.blocks:  # a message is part of the sender's work
        lasts, lag = lasts + lag, np.zeros_like(lag)
    lasts = np.append(lasts, model.weight * model.parts)
    before = np.concatenate([[0.0], lag[:-1], np.zeros(num_stages)])
    return lasts, before, np.append(model.home, model.home[:num_stages])


def _alone(task: Task) -> Array:
    """When each pass begins if a microbatch is alone, and each W behind its I."""
    begin, last = alone(task.model), 2 * task.num_stages - 1 - np.arange(task.num_stages)
    return np.append(begin, begin[last] + task.model.lasts[last])


def _keeps(task: Task) -> Array:
    return task.model.frees * task.model.parts


def _limit(task: Task) -> Array:
    return np.clip(task.model.limit, LEAST, MOST)


def _begins(counts: Array) -> Array:
    return np.concatenate([[0], np.cumsum(counts)])
