"""Simulate given rows, or rows written by a dispatch rule."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from zeropipe.core.jit import compiled
from zeropipe.searching.row_kernels import NEVER, dispatch_rows, simulate_rows
from zeropipe.searching.tables import Array, DispatchRule, row_buffers
from zeropipe.searching.task import SearchTask

MIN_FITS = (1.0, 0.5, 0.0)  # parts of a W that must fit into a gap: each is tried


class Candidate(NamedTuple):
    """Rows with how their W fill gaps, and their value; and the dispatch rule that wrote them, if one did."""

    value: float
    rows: Array
    min_fit: Array
    rule: DispatchRule | None = None


class Evaluator:
    """Finds the value of rows: the makespan, or the longest span. For one thread."""

    def __init__(self, task: SearchTask) -> None:
        self.task = task
        self._buffers = row_buffers(task.tables)
        self._no_output = np.zeros(0, np.int64)

    def simulate(self, rows: Array, min_fit: Array, rule: DispatchRule | None = None) -> Candidate | None:
        """Return the rows as a candidate; None where they exceed a memory limit or deadlock."""
        makespan = compiled(simulate_rows)(
            tables=self.task.tables, buffers=self._buffers, rows=rows, min_fit=min_fit, out=self._no_output
        )
        if makespan >= NEVER:
            return None
        end, start = self._buffers.last_end, self._buffers.first_start
        value = float((end - start).max() if self.task.minimizes_span else end.max())
        return Candidate(value, rows, min_fit, rule)

    def best_fit(self, rows: Array) -> Candidate | None:
        """Return the rows with the best of several `min_fit`."""
        fits = (np.full(self.task.num_ranks, min_fit) for min_fit in MIN_FITS)
        found = [candidate for min_fit in fits if (candidate := self.simulate(rows, min_fit))]
        return min(found, key=lambda candidate: candidate.value, default=None)

    def dispatch(self, rule: DispatchRule) -> Candidate | None:
        """Return the rows that a rule writes."""
        rows = np.zeros(int(self.task.tables.row_start[-1]), np.int64)
        makespan = compiled(dispatch_rows)(tables=self.task.tables, buffers=self._buffers, rule=rule, rows=rows)
        return None if makespan >= NEVER else self.simulate(rows, rule.min_fit, rule)


def best_of(candidates: Iterable[Candidate | None], count: int) -> list[Candidate]:
    """Return the best candidates, the best first, one of each value."""
    found: dict[float, Candidate] = {}
    for candidate in sorted((one for one in candidates if one), key=lambda one: one.value):
        found.setdefault(round(candidate.value, 9), candidate)
        if len(found) == count:
            break
    return list(found.values())
