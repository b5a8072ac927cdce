"""Which of several timelines is the best: the one statement of it, for tables, the page and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from zeropipe.core.timeline import ROUNDING, Timeline


class Standing(NamedTuple):
    """One timeline among those it competes with."""

    fits: bool  # within its memory limit, or without one
    best_time: bool  # no other that fits is faster; several may tie
    best_memory: bool  # no other that fits needs less; several may tie
    of_best: float  # its makespan divided by the best one's; below 1 only if it does not fit


class Ranking(NamedTuple):
    """The result of a comparison."""

    standings: tuple[Standing, ...]  # in the order of the timelines
    order: tuple[int, ...]  # their indices, best first


def rank_timelines(timelines: Sequence[Timeline]) -> Ranking:
    """Rank timelines by makespan and memory.

    Timelines with the same number of ranks and microbatches, in the same unit, compete; the others do different work.
    A timeline over its memory limit cannot win. If all are, `of_best` refers to the fastest of them. Times and sizes
    that differ only by rounding are equal. In the order, those that fit come first, then the faster ones, then those
    with less memory, then by index.
    """
    rows = [_figures(timeline) for timeline in timelines]
    standings = []
    for row in rows:
        fastest = _minimum([(r.fits, r.time) for r in rows if (r.work, r.unit) == (row.work, row.unit)])
        leanest = _minimum([(r.fits, r.peak) for r in rows if (r.work, r.memory_unit) == (row.work, row.memory_unit)])
        standings.append(
            Standing(
                row.fits,
                row.fits and row.time <= fastest * ROUNDING,
                row.fits and row.peak <= leanest * ROUNDING and row.peak < inf,
                row.time / fastest if fastest > 0 else 1.0,
            )
        )
    order = sorted(range(len(rows)), key=lambda n: (not rows[n].fits, _round(rows[n].time, rows), rows[n].peak, n))
    return Ranking(tuple(standings), tuple(order))


class _Figures(NamedTuple):
    work: tuple[int, int]
    unit: str
    memory_unit: str
    fits: bool
    time: float
    peak: float  # inf if the timeline has no memory


def _figures(timeline: Timeline) -> _Figures:
    return _Figures(
        (timeline.num_ranks, timeline.schedule.num_microbatches), timeline.unit, timeline.memory_unit,
        not timeline.over_limit, timeline.makespan, max(timeline.peak_memory) if timeline.memory else inf,
    )  # fmt: skip


def _minimum(values: list[tuple[bool, float]]) -> float:
    """The minimum of the values that fit, or of all if none fits."""
    return min((value for fits, value in values if fits), default=min(value for _, value in values))


def _round(time: float, rows: list[_Figures]) -> float:
    """The least of the times that are equal to `time` but for rounding."""
    return min(row.time for row in rows if time <= row.time * ROUNDING)
