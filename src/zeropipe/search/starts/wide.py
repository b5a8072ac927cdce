"""Starts of a search for little memory: beams of many hundred schedules or more, in which all kinds of them go on.

Narrow beams (beams.py) try many settings. Wide ones have few, but groups of schedules that all get their places
(growing.py), and they know how long memory is needed for what is left.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import numpy as np

from zeropipe.search.climb import walked
from zeropipe.search.judge import Start
from zeropipe.search.model import Array, Task, alone
from zeropipe.search.starts.beams import Setting, bed_of, field_of, grown
from zeropipe.search.starts.rules import most_alive

# by what schedules are told apart, and how much of a W must fit into a gap
WAYS = (("begun", 0.5), ("scarce", 0.5), ("scarce", 0.0), ("begun", 1.0))
FIRST, EACH = 500, 0.15  # schedules side by side at first and at least, or so many for each step of the search ...
MOST = 10_000_000  # ... and at most so many for all passes
HOPELESS = 1.03  # times the best: what cannot end before is given up
WALK = 5  # steps for each schedule that goes on
SOFT, SCARCE = 20.0, 0.3  # how much the mean over the ranks counts, and the time that memory is needed for beside it


def widened(task: Task, value: float, enough: float, steps: int | None, seed: int, stop: Array) -> Iterator[Start]:
    """What one beam after the other leads to, until `enough` is reached; `value` is what is known already.

    All ways are tried, and then again twice as wide; by steps each once, as wide as the steps allow.
    """
    most = MOST // int(task.model.begin[-1])
    for number in count():
        width = FIRST << number // len(WAYS) if steps is None else min(most, int(EACH * steps))
        if value <= enough or not FIRST <= width <= most or stop[0] or (steps is not None and number == len(WAYS)):
            return
        start = wide(task, HOPELESS * value, width, number, seed, stop)
        if start is not None:
            value = min(value, start.value)
            yield start


def wide(task: Task, cap: float, width: int, number: int, seed: int, stop: Array) -> Start | None:
    """What a beam of this width and a walk behind it lead to, if the beam ends before `cap`. `stop[0] = 1` ends it."""
    by, share = WAYS[number % len(WAYS)]
    field = field_of(task)
    setting = Setting(
        SOFT, SCARCE, np.full(task.num_ranks, share), most_alive(task).astype(np.int64), _apart(task, by == "scarce")
    )
    start = grown(task, field, cap, width, setting, bed_of(field, width, stop))
    return start and walked(task, start, WALK * width, 1 + 7919 * (seed + number), 0.0, stop)


def _apart(task: Task, scarce: bool) -> Array:
    """A 1 for each pass that tells groups apart: the first one, or all F of the rank whose memory is most scarce."""
    apart, half = np.zeros(2 * task.num_stages, np.int64), task.num_stages
    if not scarce:
        apart[0] = 1
        return apart
    model, begins = task.model, alone(task.model)
    stays = model.needs[:half] * (begins + model.lasts)[: half - 1 : -1] - model.needs[:half] * begins[:half]
    room = np.maximum(model.limit, 1e-300)
    rank = int(np.argmax(np.bincount(model.home[:half], stays, task.num_ranks) / room))
    apart[:half] = model.home[:half] == rank
    return apart
