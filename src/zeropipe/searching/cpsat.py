"""CP-SAT (OR-Tools) on small problems: the optimum with its proof, or a better bound."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fractions import Fraction
from itertools import pairwise
from math import ceil, floor, inf, lcm
from threading import Thread
from typing import Any, NamedTuple

import numpy as np

from zeropipe.searching.bound.bound import EXACT
from zeropipe.searching.model import Array, Task

FINEST = 1 << 40  # the solver counts in whole numbers: exact where they stay below this
COARSE = 1 << 24  # elsewhere the largest is so much, and what is smaller is rounded


class Proof(NamedTuple):
    """What the solver found out: a bound, and rows of passes where it found better ones."""

    bound: float
    rows: Array | None


def available() -> bool:
    """Whether OR-Tools is installed."""
    from importlib.util import find_spec

    return find_spec("ortools") is not None


def prove(
    task: Task,
    starts: Array | None,
    value: float,
    bound: float,
    *,
    seconds: float,
    steps: int | None = None,
    seed: int = 0,
    workers: int = 1,
    stopped: Callable[[], bool] = lambda: False,
) -> Proof:
    """Look for something better than `value`, which passes that begin at `starts` may reach, and for a better bound.

    With `steps` the effort is measured by the solver's own count, which does not depend on the machine.
    """
    from ortools.sat.python import cp_model

    sums = _Sums(cp_model.CpModel(), task, value)
    if sums.time.exact:
        sums.model.add(sums.goal >= ceil(bound * sums.time.scale - 1e-6))
    for x, row in enumerate(() if starts is None else starts):
        for start, begin in zip(sums.passes[x], row, strict=True):
            sums.model.add_hint(start, min(sums.horizon, floor(begin * sums.time.scale + 1e-6)))
    solver = cp_model.CpSolver()
    solver.parameters.random_seed = seed
    solver.parameters.num_workers = workers
    solver.parameters.catch_sigint_signal = False
    if steps is None:
        solver.parameters.max_time_in_seconds = seconds
    else:
        solver.parameters.interleave_search = True  # the same on any number of workers
        solver.parameters.max_deterministic_time = steps / 1000
    outcome = _run(lambda: solver.solve(sums.model), solver.stop_search, stopped)
    if outcome == cp_model.INFEASIBLE and sums.time.exact:
        return Proof(value * (1 - EXACT), None)
    if outcome not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Proof(bound, None)
    least = solver.best_objective_bound / sums.time.scale * (1 - EXACT)
    better = solver.objective_value < sums.horizon
    begins = np.array([[solver.value(start) for start in row] for row in sums.passes])
    return Proof(max(bound, least), _rows(task, begins) if better else None)


def _run(solve: Callable[[], Any], stop: Callable[[], None], stopped: Callable[[], bool]) -> Any:
    """Solve in a thread, so that Ctrl-C is heard and `stopped` is asked."""
    outcome: list[Any] = []
    thread = Thread(target=lambda: outcome.append(solve()), daemon=True)
    thread.start()
    try:
        while thread.is_alive() and not stopped():
            thread.join(0.02)
    finally:
        while thread.is_alive():
            stop()
            thread.join(0.02)
    return outcome[0] if outcome else None


class _Unit:
    """Amounts as whole numbers: exactly if that is possible, else rounded."""

    def __init__(self, amounts: Iterable[float], largest: float, rounds: Callable[[float], int]) -> None:
        self._rounds = rounds
        whole = 1
        for amount in amounts:
            whole = lcm(whole, Fraction(repr(float(amount))).denominator)
        self.exact = whole * largest < FINEST
        self.scale = float(whole) if self.exact else COARSE / largest

    def __call__(self, amount: float) -> int:
        return round(amount * self.scale) if self.exact else self._rounds(amount * self.scale)


class _Sums:
    """The constraints. Times and memory are rounded down, limits up: what is proven holds for the real numbers."""

    def __init__(self, model: Any, task: Task, value: float) -> None:
        tables = task.model
        self.model, self._task = model, task
        self.time = _Unit({*tables.lasts, *tables.lag, *tables.holds, *tables.weight}, value, floor)
        self.horizon = floor(value * self.time.scale + 1e-6)
        self._lasts, self._lag, self._holds, self._weight = (
            [self.time(t) for t in column] for column in (tables.lasts, tables.lag, tables.holds, tables.weight)
        )
        self._last = 2 * task.num_stages - 1
        self._busy: list[list[Any]] = [[] for _ in range(task.num_ranks)]
        self.passes = [[self._start() for _ in range(task.num_microbatches)] for _ in tables.home]
        self._weights = [[self._start() for _ in range(task.num_microbatches * tables.parts)] for _ in tables.weight]
        self._chain()
        self._owe()
        for intervals in self._busy:
            model.add_no_overlap(intervals)
        self._fit()
        self.goal = self._start()
        firsts = task.first_stages
        for stage, parts in enumerate(self._weights):
            begin = self.passes[firsts[tables.home[stage]]][0] if task.span else 0
            model.add(self.goal >= parts[-1] + self._weight[stage] - begin)
        model.minimize(self.goal)

    def _start(self) -> Any:
        return self.model.new_int_var(0, self.horizon, "")

    def _chain(self) -> None:
        """Each pass after the one before it and after the microbatch before; messages one after the other."""
        tables, model = self._task.model, self.model
        sending: dict[int, list[Any]] = {}
        for x, starts in enumerate(self.passes):
            size = self._lasts[x] + (self._lag[x] if tables.blocks else 0)
            for j, start in enumerate(starts):
                self._busy[tables.home[x]].append(model.new_fixed_size_interval_var(start, size, ""))
                if j:
                    model.add(start >= starts[j - 1] + self._lasts[x])
                if x == self._last:
                    continue
                leaves = start + self._lasts[x]
                if tables.edge[x] >= 0:
                    leaves = self._start()
                    model.add(leaves >= start + self._lasts[x])
                    held = model.new_fixed_size_interval_var(leaves, self._holds[x], "")
                    sending.setdefault(int(tables.edge[x]), []).append(held)
                model.add(self.passes[x + 1][j] >= leaves + self._lag[x])
        for intervals in sending.values():
            model.add_no_overlap(intervals)
        if self._task.in_line:  # each rank's first action waits for nothing but its input
            heads = np.concatenate([[0], np.cumsum(np.array(self._lasts) + np.array(self._lag))])
            for stage in self._task.first_stages:
                model.add(self.passes[stage][0] == int(heads[stage]))

    def _owe(self) -> None:
        """Each W, part by part, behind its I and the W before it."""
        tables, model = self._task.model, self.model
        for stage, parts in enumerate(self._weights):
            x = self._last - stage
            for at, part in enumerate(parts):
                model.add(part >= self.passes[x][at // tables.parts] + self._lasts[x])
                if at:
                    model.add(part >= parts[at - 1] + self._weight[stage])
                interval = model.new_fixed_size_interval_var(part, self._weight[stage], "")
                self._busy[tables.home[stage]].append(interval)

    def _fit(self) -> None:
        """The memory of each rank: an F takes at its start, I and W give back at their ends."""
        tables, task = self._task.model, self._task
        if not np.isfinite(tables.limit).any():
            return
        largest = float(max(tables.limit[np.isfinite(tables.limit)].max(), tables.needs.max()))
        stash = tables.frees * tables.parts
        size = _Unit({*tables.needs[: task.num_stages], *stash, *task.limits[np.isfinite(task.limits)]}, largest, floor)
        for rank in range(task.num_ranks):
            if tables.limit[rank] == inf:
                continue
            times, changes = [], []
            for stage in np.flatnonzero(tables.home[: task.num_stages] == rank):
                takes, kept = size(tables.needs[stage]), size(stash[stage])
                x, m = self._last - stage, task.num_microbatches
                times += self.passes[stage]
                changes += [takes] * m
                times += [start + self._lasts[x] for start in self.passes[x]]
                changes += [kept - takes] * m
                times += [part + self._weight[stage] for part in self._weights[stage]]
                ends = [kept * at // tables.parts for at in range(tables.parts + 1)]
                changes += [before - after for before, after in pairwise(ends)] * m
            room = round(task.limits[rank] * size.scale) if size.exact else ceil(tables.limit[rank] * size.scale)
            self.model.add_reservoir_constraint(times, changes, 0, room)


def _rows(task: Task, starts: Array) -> Array:
    """The order of the passes on each rank."""
    tables, m = task.model, task.num_microbatches
    rows = []
    for rank in range(task.num_ranks):
        mine = np.flatnonzero(tables.home == rank)
        order = np.argsort(starts[mine].ravel(), kind="stable")
        rows.append(np.repeat(mine, m)[order])
    return np.concatenate(rows)
