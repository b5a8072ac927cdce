"""The path of one microbatch at the least cost of everything: the basis of all bounds."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from zeropipe.searching.tables import Array
from zeropipe.searching.task import SearchTask


class EarliestTimes(NamedTuple):
    """Least durations, and the path of a microbatch that is alone."""

    duration: Array  # of each pass
    lag: Array  # of its result
    w_duration: Array  # of each stage's full W
    stash: Array  # of each stage
    start: Array  # of each pass
    to_end: Array  # least time from the start of each pass to the end of everything


def earliest_times(task: SearchTask) -> EarliestTimes:
    """Return the least times of a task, whether backwards are split or not and Overlaps are used or not."""
    tables, num_stages, costs = task.tables, task.num_stages, task.costs
    f, i, w, b, overlap = (np.array(costs.column(name, num_stages)) for name in ("f", "i", "w", "b", "overlap"))
    # a B may be cheaper than I and W; an Overlap of two stages saves half of what each stage's own pair saves, or with
    # phases at most half of what each one's best pair saves
    half_saved = np.maximum(np.maximum(f + b - overlap, 0), task.phase_savings) / 2
    full, first = np.minimum(b, i + w), np.minimum(i, b)
    excess = max(0.0, float((half_saved - f).max()), float((half_saved - first).max()))
    f, i = (np.maximum(0, time - half_saved - np.where(half_saved > 0, excess, 0)) for time in (f, first))
    w = np.maximum(0, full - first)
    duration, lag = np.concatenate([f, i[::-1]]), tables.lag
    if tables.blocking:  # a message is part of the sender's work
        duration, lag = duration + lag, np.zeros_like(lag)
    to_end, after = np.zeros(2 * num_stages), 0.0
    for x in range(task.last_pass, -1, -1):
        if x >= num_stages:  # its W follows
            after = max(after, float(w[task.last_pass - x]))
        to_end[x] = after = after + duration[x]
        if x:
            after += lag[x - 1]
    return EarliestTimes(
        duration=duration, lag=lag, w_duration=w,
        stash=np.minimum(costs.column("stash", num_stages), costs.column("activation", num_stages)),
        start=np.concatenate([[0.0], np.cumsum(duration + lag)[:-1]]), to_end=to_end,
    )  # fmt: skip


def max_unfinished_send(task: SearchTask) -> float:
    """Return how much of a blocked sender's work may come after the end of its last action."""
    return float(task.tables.lag.max()) if task.tables.blocking else 0.0


def time_after_last_i(task: SearchTask, times: EarliestTimes, stage: int) -> float:
    """Return the least time from the last I of `stage`, the first of its rank, to the end of what counts.

    For spans: to the end of the span of a rank before it, less how much earlier that span began.
    """
    stages = np.arange(stage + 1)
    i = task.last_pass - stages
    ends = times.start[i] + times.duration[i] + times.w_duration[stages]
    if task.minimizes_span:
        firsts = np.array(task.first_stages)[task.tables.rank[stages]]
        ends = ends + times.start[stage] - times.start[firsts]
    return float(ends.max() - times.start[i[-1]] - times.duration[i[-1]])
