"""What rows of passes reach."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from zeropipe.core.jit import compiled
from zeropipe.search import kernels
from zeropipe.search.model import Array, Task, Work

SHARES = (1.0, 0.5, 0.0)  # how much of a W must fit into a gap


class Start(NamedTuple):
    """Rows of passes with how they fill gaps, and what they reach."""

    value: float
    rows: Array
    share: Array


class Rule(NamedTuple):
    """What the dispatch goes by (see kernels.dispatch)."""

    order: Array
    cap: Array
    look0: float
    look: float
    share: float


class Judge:
    """Plays rows of one task and says what they reach."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self._work: Work = task.work()
        self._none = np.zeros(0, np.int64)

    def value(self) -> float:
        """Of what was played or dispatched last."""
        work = self._work
        return float((work.last - work.first).max() if self.task.span else work.last.max())

    def play(self, rows: Array, share: float | Array) -> Start | None:
        """None where the rows do not fit or cannot end."""
        shares = np.full(self.task.num_ranks, share) if isinstance(share, float) else share
        if compiled(kernels.play)(self.task.model, self._work, rows, shares, self._none) >= kernels.FAR:
            return None
        return Start(self.value(), rows, shares)

    def plays(self, rows: Array) -> Start | None:
        """The best of several shares."""
        found = [start for share in SHARES if (start := self.play(rows, share))]
        return min(found, key=lambda start: start.value, default=None)

    def dispatch(self, rule: Rule) -> Start | None:
        """The rows that a rule writes."""
        ranks = np.ones(self.task.num_ranks)
        rows = np.zeros(int(self.task.model.begin[-1]), np.int64)
        makespan = compiled(kernels.dispatch)(
            self.task.model, self._work, rule.order, rule.cap,
            rule.look0 * ranks, rule.look * ranks, rule.share * ranks, rows,
        )  # fmt: skip
        return None if makespan >= kernels.FAR else self.play(rows, rule.share)


def best_of(starts: Iterable[Start | None], keep: int) -> list[Start]:
    """The best ones, one of each value."""
    found: dict[float, Start] = {}
    for start in sorted((start for start in starts if start), key=lambda start: start.value):
        found.setdefault(round(start.value, 9), start)
        if len(found) == keep:
            break
    return list(found.values())
