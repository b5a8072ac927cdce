"""Which of several timelines is the best: the one statement of it, for tables, the page and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from zeropipe.core.timeline import ROUNDING, Timeline


class Standing(NamedTuple):
    """One timeline among those it competes with."""

    fits: bool  # within its memory limit, or there is none
    best_time: bool  # no other that fits is faster; several may tie
    best_memory: bool  # no other that fits needs less; several may tie
    of_best: float  # its makespan over the best one's; below 1 only for one that does not fit


class Ranking(NamedTuple):
    """A comparison's result."""

    standings: tuple[Standing, ...]  # in the order of the timelines
    order: tuple[int, ...]  # their places, best first
    none_fits: bool  # all are over their memory limit: nobody wins


def ranking(timelines: Sequence[Timeline]) -> Ranking:
    """How the timelines stand.

    Those with the same number of ranks and microbatches, in the same unit, compete: others do other work. What is over
    its memory limit cannot win; if that is so for all, `of_best` is about the fastest of them. Times and sizes that
    differ only by rounding are the same. In the order, what fits comes first, then the faster, then the one with less
    memory, then the one named first.
    """
    rows = [_figures(timeline) for timeline in timelines]
    standings = []
    for row in rows:
        fastest = _least([(r.fits, r.time) for r in rows if (r.work, r.unit) == (row.work, row.unit)])
        leanest = _least([(r.fits, r.peak) for r in rows if (r.work, r.memory_unit) == (row.work, row.memory_unit)])
        standings.append(
            Standing(
                row.fits,
                row.fits and row.time <= fastest * ROUNDING,
                row.fits and row.peak <= leanest * ROUNDING and row.peak < inf,
                row.time / fastest if fastest > 0 else 1.0,
            )
        )
    order = sorted(range(len(rows)), key=lambda n: (not rows[n].fits, _rounded(rows[n].time, rows), rows[n].peak, n))
    return Ranking(tuple(standings), tuple(order), bool(rows) and not any(row.fits for row in rows))


class _Figures(NamedTuple):
    work: tuple[int, int]
    unit: str
    memory_unit: str
    fits: bool
    time: float
    peak: float  # inf where memory is not known


def _figures(timeline: Timeline) -> _Figures:
    return _Figures(
        (timeline.num_ranks, timeline.schedule.num_microbatches), timeline.unit, timeline.memory_unit,
        not timeline.over_limit, timeline.makespan, max(timeline.peak_memory) if timeline.memory else inf,
    )  # fmt: skip


def _least(values: list[tuple[bool, float]]) -> float:
    """The least value of those that fit, or of all if none does."""
    return min((value for fits, value in values if fits), default=min(value for _, value in values))


def _rounded(time: float, rows: list[_Figures]) -> float:
    """The least of all times that `time` is equal to but for rounding."""
    return min(row.time for row in rows if time <= row.time * ROUNDING)
