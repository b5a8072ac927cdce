"""Starts of a search for little memory: the kernel of the bounds follows all ranks, but only the best states go on.

W may be interrupted there (ordering.py), so they need no choice, and thousands of states are followed side by side.
What that comes to is played with whole W.
"""

from __future__ import annotations

import numpy as np

from zeropipe.core.jit import compiled
from zeropipe.search.bound.bound import all_ranks
from zeropipe.search.bound.few import ANY, place_of
from zeropipe.search.bound.ordering import order
from zeropipe.search.climb import walked
from zeropipe.search.judge import Judge, Start
from zeropipe.search.model import Array, Task
from zeropipe.search.starts.beams import rows_of, way_back

EACH = 10  # states that there is place for, for each that goes on
SAME = 4  # of those that have come equally far are kept apart
WALK = 5  # steps for each state that goes on
SOFT = 20.0  # times the mean over the ranks counts as much as what everything needs at least


def wide(task: Task, cap: float, width: int, seed: int, stop: Array) -> Start | None:
    """What a beam of this width and a walk behind it lead to, if the beam ends before `cap`. `stop[0] = 1` ends it."""
    few = all_ranks(task)
    place = place_of(few, EACH * width, stop, width)
    end = compiled(order)(few, cap, SAME, ANY, width, SOFT, place)
    if end >= cap or not place.whole[0]:
        return None
    one = int(place.first[0, 0])  # layers go from side to side, and their number is even
    before = way_back(place.chosen[1:], place.parent[1:], int(place.origin[0, one]))
    start = Judge(task).plays(rows_of(task, np.append(before, place.choice[0, one])))
    return start and walked(task, start, WALK * width, 1 + 7919 * seed, 0.0, stop)
