"""Starts of a search for little memory: beams of many hundred schedules or more, in which all kinds of them go on.

Narrow beams (beams.py) try many settings. Wide ones have few, but groups of schedules that all get their places
(growing.py), and they know how long memory is needed for what is left.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from zeropipe.searching.climb import walked
from zeropipe.searching.judge import Start
from zeropipe.searching.model import Array, Task
from zeropipe.searching.starts.beams import Setting, bed_of, field_of, grown
from zeropipe.searching.starts.rules import most_alive
from zeropipe.searching.starts.scarce import in_memory

# by what schedules are told apart, how much the time counts that memory is needed for, and how much of a W must fit
# into a gap
WAYS = (
    ("begun", 0.3, 0.5), ("scarce", 1.0, 0.5), ("begun", 1.0, 0.0), ("scarce", 0.3, 0.0), ("begun", 1.0, 0.5),
    ("scarce", 0.3, 0.5),
)  # fmt: skip
SOFT = 20.0  # times the mean over the ranks counts as much as the least time that everything can take
FIRST, EACH = 250, 0.08  # schedules side by side at first and at least, or so many for each step of the search ...
MOST = 10_000_000  # ... and at most so many for all passes
HOPELESS = 1.03  # times the best: what cannot end before is given up
WALKS, WALK = 2, 20  # from the end of each beam, and steps of each for each schedule that was side by side
LAST_WALKS, LAST_WALK = 4, 60  # and from the best end of all


def widened(task: Task, value: float, enough: float, steps: int | None, seed: int, stop: Array) -> Iterator[Start]:
    """What one beam after the other leads to, until `enough` is reached; `value` is what is known already.

    All ways are tried, and then again twice as wide; by steps each once, as wide as the steps allow.
    """
    most = MOST // int(task.model.begin[-1])
    width = FIRST if steps is None else min(most, int(EACH * steps))
    while FIRST <= width <= most:
        best: Start | None = None
        for number in range(len(WAYS) + 1):
            if value <= enough or stop[0]:
                return
            if number < len(WAYS):
                start = wide(task, HOPELESS * value, width, number, seed, stop)
            else:
                start = best and _walked(task, best, LAST_WALKS, LAST_WALK * width, 1 + 7919 * (seed + number), stop)
            if start is not None:
                best = min(best or start, start, key=lambda one: one.value)
                value = min(value, start.value)
                yield start
        if steps is not None:
            return
        width *= 2


def wide(task: Task, cap: float, width: int, number: int, seed: int, stop: Array) -> Start | None:
    """What a beam of this width and walks behind it lead to, if the beam ends before `cap`. `stop[0] = 1` ends it."""
    by, scarce, share = WAYS[number % len(WAYS)]
    field = field_of(task)
    setting = Setting(
        SOFT, scarce, np.full(task.num_ranks, share), most_alive(task).astype(np.int64), _apart(task, by == "scarce")
    )
    start = grown(task, field, cap, width, setting, bed_of(field, width, stop))
    return start and _walked(task, start, WALKS, WALK * width, 1 + 7919 * (seed + number), stop)


def _walked(task: Task, start: Start, times: int, steps: int, number: int, stop: Array) -> Start:
    """The best that some walks from a start lead to."""
    walks = [walked(task, start, steps, number + 104_729 * k, 0.0, stop) for k in range(times)]
    return min(walks, key=lambda one: one.value)


def _apart(task: Task, scarce: bool) -> Array:
    """A 1 for each pass that tells groups apart: the first one, or all F of the rank whose memory is most scarce."""
    apart, half = np.zeros(2 * task.num_stages, np.int64), task.num_stages
    if scarce:
        apart[:half] = task.model.home[:half] == np.argmax(in_memory(task)[0][0])
    else:
        apart[0] = 1
    return apart
