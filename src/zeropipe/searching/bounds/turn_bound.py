"""Bound by microbatches that take turns in the memory of a rank, with one stage per rank (turn_kernel.py)."""

from __future__ import annotations

import numpy as np

from zeropipe.core.jit import compiled
from zeropipe.searching.bounds.rank_bounds import (
    EarliestTimes,
    drain_time,
    max_unfinished_send,
    num_slots,
    slot_wait,
    time_after_last_i,
    turnover_times,
)
from zeropipe.searching.bounds.turn_kernel import PROGRESS_BITS, TurnBuffers, TurnTables, earliest_return
from zeropipe.searching.tables import Array
from zeropipe.searching.task import SearchTask

TOLERANCE = 1e-11  # of a microbatch's path, for all its actions together
MIN_FOLLOWED = 2  # slots that are followed at first
FIRST_GROWTH = 5.0  # of the effort with each further slot, before it is known
MIN_GROWTH = 2.0
MAX_STATES = 8  # of a group
MAX_GROUPS = 1 << 15
MAX_KEY_BITS = 56
MIN_TURNOVER = 0.8  # of the best bound: the turnover of a rank that is worth following


def turn_bound(task: SearchTask, times: EarliestTimes, best: float, cap: float, effort: int, stop: Array) -> float:
    """Return a bound by the turnover of each rank's memory, the rank with the longest turnover first."""
    found = 0.0
    if task.problem.stages_per_rank > 1:
        return found
    drains = np.array([drain_time(task, times, rank, np.inf, in_parts=False) for rank in range(task.num_ranks)])
    full = [rank for rank in range(task.num_ranks) if num_slots(task, rank) < task.num_microbatches]
    turns = [_Turns(task, times, rank, drains, stop) for rank in full]
    for turn in sorted(turns, key=lambda turn: -turn.turnover):
        if turn.turnover > MIN_TURNOVER * max(best, found):
            value, effort = turn.follow(cap - turn.around, effort)
            found = max(found, value + turn.around)
    return found


class _Turns:
    """The microbatches of one stage, from their F to their I, that take turns in its memory."""

    def __init__(self, task: SearchTask, times: EarliestTimes, rank: int, drains: Array, stop: Array) -> None:
        self._task, self._times, self._drains, self._stop = task, times, drains, stop
        self._stage = stage = task.first_stages[rank]
        self._num_slots, self._slot_wait = num_slots(task, rank), slot_wait(task, times, rank)
        self._passes = np.arange(stage, task.last_pass - stage + 1)
        self._after = time_after_last_i(task, times, stage)
        start = 0.0 if task.minimizes_span else float(times.start[stage])
        self.around = start + self._after - max_unfinished_send(task)  # before the first F and after the last I
        self.turnover = float(turnover_times(task, times, rank)[-1]) + self.around

    def follow(self, cap: float, effort: int) -> tuple[float, int]:
        """Return the least time from the first F to the last I, or `cap` if it is not below; and the effort left.

        At first two slots are followed, then more while the effort suffices: leaving slots out never makes it longer.
        """
        best, growth, before = 0.0, FIRST_GROWTH, 0
        for followed in range(MIN_FOLLOWED, self._num_slots + 1):
            if len(self._passes) + 1 >= 1 << PROGRESS_BITS or PROGRESS_BITS * followed > MAX_KEY_BITS:
                break
            value, examined = self._follow(followed, cap, effort)
            best, effort = max(best, value), effort - examined
            growth = max(MIN_GROWTH, examined / before) if before else growth
            if best >= cap or examined * growth > effort or self._stop[0]:
                break
            before = examined
        return min(best, cap), effort

    def _follow(self, followed: int, cap: float, effort: int) -> tuple[float, int]:
        """Return the least time by the first `followed` slots, 0 if the effort does not suffice; and the effort."""
        m, i = self._task.num_microbatches, float(self._times.duration[self._passes[-1]])
        numbers = np.array([number for number in range(m) if number % self._num_slots < followed])
        i_of_others = (m - 1 - int(numbers[-1])) * i  # behind the last one that is followed
        tables = self._tables(followed, numbers, i_of_others)
        buffers = _buffers(max(64, min(MAX_GROUPS, effort // 16)), followed, self._stop)
        found = compiled(earliest_return)(tables=tables, buffers=buffers, cap=float(cap - i_of_others), effort=effort)
        if found < 0:
            return 0.0, int(buffers.num_examined[0])
        rounding = tables.tolerance * len(tables.rank) * len(numbers)
        return float(found) + i_of_others - rounding, int(buffers.num_examined[0])

    def _tables(self, followed: int, numbers: Array, i_of_others: float) -> TurnTables:
        task, times, passes, stage = self._task, self._times, self._passes, self._stage
        rank, duration, lag = task.tables.rank[passes], times.duration[passes], times.lag[passes].copy()
        lag[-1] = 0.0
        to_return = np.append(np.cumsum((duration + lag)[::-1])[::-1], 0.0)
        work_left = np.zeros((len(passes) + 1, task.num_ranks))
        for at in range(len(passes) - 1, -1, -1):
            i_stage = task.last_pass - passes[at]
            w = times.w_duration[i_stage] if passes[at] >= task.num_stages else 0.0
            work_left[at] = work_left[at + 1]
            work_left[at, rank[at]] += duration[at] + w
        last_f = np.full(task.num_ranks, -1)
        last_f[rank[: len(passes) // 2]] = np.arange(len(passes) // 2)
        wait, activation = self._slot_wait, task.tables.memory[stage]
        if wait > 0 and times.stash[stage] >= activation and task.tables.weight_parts == 1:
            # the W has to run before another microbatch takes over the slot
            rank, duration, lag = np.append(rank, rank[0]), np.append(duration, wait), np.append(lag, 0.0)
            to_return, work_left, wait = np.append(to_return, 0.0), np.vstack([work_left, work_left[-1:]]), 0.0
        return TurnTables(
            num_slots=followed, tolerance=TOLERANCE * float(to_return[0]) / len(rank), rank=rank, duration=duration,
            lag=lag, num_passes=len(passes), to_return=to_return, wait=wait, work_left=work_left, drain=self._drains,
            last_f=last_f, after=np.inf if task.minimizes_span else self._after + i_of_others,
            max_wait=(self._num_slots - followed) * float(duration.max()),
            numbers=np.append(numbers, task.num_microbatches), arrival=numbers * duration[0],
        )  # fmt: skip


def _buffers(max_groups: int, followed: int, stop: Array) -> TurnBuffers:
    def ints(*size: int) -> Array:
        return np.zeros(size, np.int64)

    return TurnBuffers(
        keys=ints(2, max_groups), sizes=ints(2, max_groups), work=np.zeros((2, max_groups)),
        states=np.zeros((2, max_groups, MAX_STATES, 2 * followed)), table=ints(4 * max_groups),
        progress=ints(followed), ready=np.zeros(followed), new_progress=ints(followed), new_ready=np.zeros(followed),
        new=np.zeros(2 * followed + 1), num_groups=ints(1), num_examined=ints(1), stop=stop,
    )  # fmt: skip
