"""What rows of passes, and rules that write them, reach."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from zeropipe.core.jit import compiled
from zeropipe.searching import kernels
from zeropipe.searching.model import Array, Task, Work

SHARES = (1.0, 0.5, 0.0)  # how much of a W must fit into a gap


class Rule(NamedTuple):
    """What the dispatch goes by (see kernels.dispatch)."""

    order: Array
    cap: Array
    look0: Array
    look: Array
    share: Array

    def copy(self) -> Rule:
        """One that can be changed."""
        return Rule(*(column.copy() for column in self))


class Start(NamedTuple):
    """Rows of passes with how they fill gaps, and what they reach; and the rule that wrote them, if one did."""

    value: float
    rows: Array
    share: Array
    rule: Rule | None = None


class Judge:
    """Plays rows of one task and says what they reach."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self._work: Work = task.work()
        self._none = np.zeros(0, np.int64)

    def play(self, rows: Array, share: float | Array, rule: Rule | None = None) -> Start | None:
        """None where the rows do not fit or cannot end."""
        shares = np.full(self.task.num_ranks, share) if isinstance(share, float) else share
        if compiled(kernels.play)(self.task.model, self._work, rows, shares, self._none) >= kernels.FAR:
            return None
        last, first = self._work.last, self._work.first
        return Start(float((last - first).max() if self.task.span else last.max()), rows, shares, rule)

    def plays(self, rows: Array) -> Start | None:
        """The best of several shares."""
        found = [start for share in SHARES if (start := self.play(rows, share))]
        return min(found, key=lambda start: start.value, default=None)

    def dispatch(self, rule: Rule) -> Start | None:
        """The rows that a rule writes."""
        rows = np.zeros(int(self.task.model.begin[-1]), np.int64)
        makespan = compiled(kernels.dispatch)(self.task.model, self._work, *rule, rows)
        return None if makespan >= kernels.FAR else self.play(rows, rule.share, rule)


def best_of(starts: Iterable[Start | None], keep: int) -> list[Start]:
    """The best ones, one of each value."""
    found: dict[float, Start] = {}
    for start in sorted((start for start in starts if start), key=lambda start: start.value):
        found.setdefault(round(start.value, 9), start)
        if len(found) == keep:
            break
    return list(found.values())
