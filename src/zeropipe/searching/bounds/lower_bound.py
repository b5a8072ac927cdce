"""Proven lower bounds of the makespan, or of the longest rank's span.

They hold for every schedule of the placement, also with B and Overlaps. Equal microbatches can be taken to keep their
order in every pass: renumbering them never breaks a schedule.
"""

from __future__ import annotations

import numpy as np

from zeropipe.searching.bounds.rank_bounds import earliest_times, link_bound, rank_bound
from zeropipe.searching.bounds.subset_bound import SubsetBounds
from zeropipe.searching.bounds.turn_bound import turn_bound
from zeropipe.searching.tables import Array
from zeropipe.searching.task import SearchTask

ROUNDING = 1e-12  # relative, of sums of times
QUICK_EFFORT, THOROUGH_EFFORT = 30_000, 400_000  # states that each kernel examines, 0.5 to 2 us each
EFFORT_GROWTH = 16  # where the effort is larger than that times THOROUGH_EFFORT, it grows in rounds
CAP_MARGIN = 5e-10  # relative: a bound this near to the cap is at the cap


def lower_bound(task: SearchTask, effort: int = QUICK_EFFORT, cap: float = np.inf, stop: Array | None = None) -> float:
    """Return a proven lower bound of what the task minimizes.

    `cap` is a value that was reached: larger bounds are not needed, which saves time. `stop[0] = 1`, set by another
    thread, ends it.
    """
    times, stop = earliest_times(task), np.zeros(1, np.int64) if stop is None else stop
    rank_bounds = [rank_bound(task, times, rank) for rank in range(task.num_ranks)]
    best = max(link_bound(task, times), *rank_bounds)
    subsets = SubsetBounds(task, times, rank_bounds, stop)
    share, target = effort if effort < EFFORT_GROWTH * THOROUGH_EFFORT else THOROUGH_EFFORT, cap * (1 - CAP_MARGIN)
    while best < cap:
        best = max(best, turn_bound(task, times, best, target, share, stop))
        if best < cap and (task.has_fixed_starts or not task.minimizes_span):
            best = subsets.raise_bound(best, target, share)
        if share == effort or stop[0]:
            break
        share = min(effort, share * EFFORT_GROWTH)
    return float(best) * (1 - ROUNDING)
