"""CP-SAT (OR-Tools) on small tasks: the optimum with its proof, or a better bound."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fractions import Fraction
from itertools import pairwise
from math import ceil, floor, inf, lcm
from threading import Thread
from typing import Any, NamedTuple

import numpy as np

from zeropipe.searching.bounds.lower_bound import ROUNDING
from zeropipe.searching.tables import Array
from zeropipe.searching.task import SearchTask

MAX_EXACT = 1 << 40  # the solver counts in integers: amounts are exact if they stay below this
MAX_ROUNDED = 1 << 24  # otherwise the largest amount becomes this, and all are rounded


class Solution(NamedTuple):
    """A lower bound, and better rows if the solver found some."""

    bound: float
    rows: Array | None


def is_available() -> bool:
    """Return whether OR-Tools is installed."""
    from importlib.util import find_spec

    return find_spec("ortools") is not None


def solve(
    task: SearchTask,
    starts: Array | None,
    value: float,
    bound: float,
    *,
    seconds: float,
    steps: int | None = None,
    seed: int = 0,
    workers: int = 1,
    stopped: Callable[[], bool] = lambda: False,
) -> Solution:
    """Search for rows that are better than `value` and for a better bound; `starts` of passes are a hint.

    With `steps` the effort is measured by the solver's own count, which does not depend on the machine.
    """
    from ortools.sat.python import cp_model

    constraints = _Constraints(cp_model.CpModel(), task, value)
    scale = constraints.time.scale
    if constraints.time.is_exact:
        constraints.model.add(constraints.goal >= ceil(bound * scale - 1e-6))
    for x, row in enumerate(() if starts is None else starts):
        for start, time in zip(constraints.passes[x], row, strict=True):
            constraints.model.add_hint(start, min(constraints.horizon, floor(time * scale + 1e-6)))
    solver = cp_model.CpSolver()
    solver.parameters.random_seed = seed
    solver.parameters.num_workers = workers
    solver.parameters.catch_sigint_signal = False
    if steps is None:
        solver.parameters.max_time_in_seconds = seconds
    else:
        solver.parameters.interleave_search = True  # the same on any number of workers
        solver.parameters.max_deterministic_time = steps / 1000
    status = _run(lambda: solver.solve(constraints.model), solver.stop_search, stopped)
    if status == cp_model.INFEASIBLE and constraints.time.is_exact:
        return Solution(value * (1 - ROUNDING), None)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Solution(bound, None)
    proven = solver.best_objective_bound / scale * (1 - ROUNDING)
    is_better = solver.objective_value < constraints.horizon
    found = np.array([[solver.value(start) for start in row] for row in constraints.passes])
    return Solution(max(bound, proven), _rows(task, found) if is_better else None)


def _run(solve: Callable[[], Any], stop: Callable[[], None], stopped: Callable[[], bool]) -> Any:
    """Solve in a thread, so that Ctrl-C and `stopped` end it."""
    status: list[Any] = []
    thread = Thread(target=lambda: status.append(solve()), daemon=True)
    thread.start()
    try:
        while thread.is_alive() and not stopped():
            thread.join(0.02)
    finally:
        while thread.is_alive():
            stop()
            thread.join(0.02)
    return status[0] if status else None


class _Unit:
    """Amounts as integers: exact if possible, else rounded."""

    def __init__(self, amounts: Iterable[float], largest: float) -> None:
        denominator = lcm(*(Fraction(repr(float(amount))).denominator for amount in amounts))
        self.is_exact = denominator * largest < MAX_EXACT
        self.scale = float(denominator) if self.is_exact else MAX_ROUNDED / largest

    def __call__(self, amount: float) -> int:
        return round(amount * self.scale) if self.is_exact else floor(amount * self.scale)


class _Constraints:
    """The model of CP-SAT. Times and memory are rounded down, limits up: a proven bound holds for the real numbers."""

    def __init__(self, model: Any, task: SearchTask, value: float) -> None:
        tables = task.tables
        self.model, self._task = model, task
        self.time = _Unit({*tables.duration, *tables.lag, *tables.link_time, *tables.w_duration}, value)
        self.horizon = floor(value * self.time.scale + 1e-6)
        self._duration, self._lag, self._link_time, self._w_duration = (
            [self.time(t) for t in column]
            for column in (tables.duration, tables.lag, tables.link_time, tables.w_duration)
        )
        self._busy: list[list[Any]] = [[] for _ in range(task.num_ranks)]  # intervals of each rank
        self.passes = [[self._new_time() for _ in range(task.num_microbatches)] for _ in tables.rank]
        num_parts = task.num_microbatches * tables.weight_parts
        self._w_parts = [[self._new_time() for _ in range(num_parts)] for _ in tables.w_duration]
        self._add_passes()
        self._add_w()
        for intervals in self._busy:
            model.add_no_overlap(intervals)
        self._add_memory()
        self.goal = self._new_time()
        for stage, parts in enumerate(self._w_parts):
            start = self.passes[task.first_stages[tables.rank[stage]]][0] if task.minimizes_span else 0
            model.add(self.goal >= parts[-1] + self._w_duration[stage] - start)
        model.minimize(self.goal)

    def _new_time(self) -> Any:
        return self.model.new_int_var(0, self.horizon, "")

    def _add_interval(self, rank: int, start: Any, size: int) -> None:
        self._busy[rank].append(self.model.new_fixed_size_interval_var(start, size, ""))

    def _add_passes(self) -> None:
        """Run each pass after the one before it and after the microbatch before; serial links send one at a time."""
        tables, model = self._task.tables, self.model
        sent: dict[int, list[Any]] = {}
        for x, starts in enumerate(self.passes):
            for microbatch, start in enumerate(starts):
                self._add_interval(tables.rank[x], start, self._duration[x] + (self._lag[x] if tables.blocking else 0))
                if microbatch:
                    model.add(start >= starts[microbatch - 1] + self._duration[x])
                if x == self._task.last_pass:
                    continue
                departure = start + self._duration[x]
                if tables.link[x] >= 0:
                    departure = self._new_time()
                    model.add(departure >= start + self._duration[x])
                    interval = model.new_fixed_size_interval_var(departure, self._link_time[x], "")
                    sent.setdefault(int(tables.link[x]), []).append(interval)
                model.add(self.passes[x + 1][microbatch] >= departure + self._lag[x])
        for intervals in sent.values():
            model.add_no_overlap(intervals)
        if self._task.has_fixed_starts:  # a rank's first action waits for nothing but its input
            first = np.concatenate([[0], np.cumsum(np.array(self._duration) + np.array(self._lag))])
            for stage in self._task.first_stages:
                model.add(self.passes[stage][0] == int(first[stage]))

    def _add_w(self) -> None:
        """Run each W, part by part, after its I and the W before it."""
        tables, model = self._task.tables, self.model
        for stage, parts in enumerate(self._w_parts):
            i = self._task.last_pass - stage
            for at, part in enumerate(parts):
                model.add(part >= self.passes[i][at // tables.weight_parts] + self._duration[i])
                if at:
                    model.add(part >= parts[at - 1] + self._w_duration[stage])
                self._add_interval(tables.rank[stage], part, self._w_duration[stage])

    def _add_memory(self) -> None:
        """Keep the memory limit of each rank: an F takes memory at its start, I and W free it at their ends."""
        tables, task, m = self._task.tables, self._task, self._task.num_microbatches
        if not np.isfinite(tables.limit).any():
            return
        largest = float(max(tables.limit[np.isfinite(tables.limit)].max(), tables.memory.max()))
        activation, stash, limits = (
            tables.memory[: task.num_stages],
            tables.w_memory * tables.weight_parts,
            task.activation_limits,
        )
        size = _Unit({*activation, *stash, *limits[np.isfinite(limits)]}, largest)
        for rank in range(task.num_ranks):
            if tables.limit[rank] == inf:
                continue
            times, changes = [], []
            for stage in np.flatnonzero(tables.rank[: task.num_stages] == rank):
                taken, kept, i = size(activation[stage]), size(stash[stage]), task.last_pass - stage
                times += self.passes[stage]
                changes += [taken] * m
                times += [start + self._duration[i] for start in self.passes[i]]
                changes += [kept - taken] * m
                times += [part + self._w_duration[stage] for part in self._w_parts[stage]]
                levels = [kept * at // tables.weight_parts for at in range(tables.weight_parts + 1)]
                changes += [before - after for before, after in pairwise(levels)] * m
            limit = round(limits[rank] * size.scale) if size.is_exact else ceil(tables.limit[rank] * size.scale)
            self.model.add_reservoir_constraint(times, changes, 0, limit)


def _rows(task: SearchTask, starts: Array) -> Array:
    """Return the passes of each rank in the order of their starts."""
    rows = []
    for passes in task.passes_by_rank:
        order = np.argsort(starts[passes].ravel(), kind="stable")
        rows.append(np.repeat(passes, task.num_microbatches)[order])
    return np.concatenate(rows)
