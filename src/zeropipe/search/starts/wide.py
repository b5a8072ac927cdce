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

EACH = 10  # states that there is place for, for each that goes on
SAME = 4  # of those that have come equally far are kept apart
WALK = 5  # steps for each state that goes on
SOFT = 20.0  # times the mean over the ranks counts as much as what everything needs at least


def wide(task: Task, cap: float, width: int, seed: int, stop: Array) -> Start | None:
    """What a beam of this width and a walk behind it lead to, if the beam ends before `cap`. `stop[0] = 1` ends it."""
    few, layers = all_ranks(task), 2 * task.num_stages * task.num_microbatches
    place = place_of(few, EACH * width, stop, width)
    end = compiled(order)(few, cap, SAME, ANY, width, SOFT, place)
    if end >= cap or not place.whole[0]:
        return None
    last, passes = layers % 2, np.zeros(layers, np.int64)
    which = int(place.first[last, 0])
    passes[-1], one = place.choice[last, which], place.origin[last, which]
    for layer in range(layers - 1, 0, -1):
        passes[layer - 1], one = place.chosen[layer, one], place.parent[layer, one]
    start = Judge(task).plays(np.concatenate([passes[few.rank[passes] == rank] for rank in range(task.num_ranks)]))
    return start and walked(task, start, WALK * width, 1 + 7919 * seed, 0.0, stop)
