"""Search for schedules with slices: on each rank F, I and W side by side, with lags that are changed step by step.

A rank runs F of all slices in order. Its first I follows after `warmup` of them, its first W after `put_off` more
turns: 1F1B, seq1f1b and zb-h1 have such rows. The lags of each rank are changed as long as the schedule becomes
faster, or stays as fast, within the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import NamedTuple

from zeropipe.core.action import Kind
from zeropipe.core.packed import PackedRows
from zeropipe.core.placement import Placement, Problem
from zeropipe.core.schedule import Schedule
from zeropipe.core.timeline import ROUNDING, Timeline
from zeropipe.errors import ZeropipeError
from zeropipe.schedules.lane import Lane
from zeropipe.schedules.registry import build_entry, entries
from zeropipe.schedules.rounds import backwards, forwards, groups
from zeropipe.searching.bounds.slice_bound import slice_bound
from zeropipe.searching.local_search import AT_BOUND
from zeropipe.sim.costs import Costs
from zeropipe.sim.simulate import simulate


class Lags(NamedTuple):
    """Turns from the first F of a rank to its first I, and from that to its first W; no W where backwards are full."""

    warmup: int
    put_off: int | None


@dataclass(frozen=True)
class SlicedTask:
    """One number of slices and one placement, under the memory limit of each rank."""

    problem: Problem
    placement: Placement
    costs: Costs
    limits: tuple[float, ...]

    @cached_property
    def bound(self) -> float:
        """A time that no schedule of the task beats."""
        return slice_bound(self.write([Lags(0, None)] * self.problem.num_ranks), self.costs)

    def write(self, lags: list[Lags]) -> Schedule:
        """The schedule with these lags; it may have a deadlock."""
        rounds, lanes = groups(self.problem), []
        for rank, (warmup, put_off) in enumerate(lags):
            lane = Lane(rank, self.problem, self.placement)
            first = Kind.B if put_off is None else Kind.I
            streams = [
                (0, forwards(rank, self.problem, rounds)),
                (warmup, backwards(first, rank, self.problem, rounds)),
            ]
            if put_off is not None:
                streams.append((warmup + put_off, backwards(Kind.W, rank, self.problem, rounds)))
            lane.weave(*streams)
            lanes.append(lane)
        return Schedule(self.problem, self.placement, PackedRows.of(lane.codes for lane in lanes), "searched")

    def run(self, schedule: Schedule) -> Timeline | None:
        """The simulation of a schedule; None for a deadlock, or where a rank exceeds its memory."""
        try:
            timeline = simulate(schedule, self.costs)
        except ZeropipeError:
            return None
        fits = all(peak <= limit * ROUNDING for peak, limit in zip(timeline.peak_memory, self.limits, strict=True))
        return timeline if fits else None

    def registered(self) -> Iterator[Timeline]:
        """The simulations of registered schedules with these slices that fit."""
        p = self.problem
        for entry in entries():
            if not entry.has_slices or p.stages_per_rank not in entry.stages_per_rank:
                continue
            schedule = build_entry(
                entry, ranks=p.num_ranks, microbatches=p.num_microbatches, stages_per_rank=p.stages_per_rank,
                slices=p.num_slices,
            )  # fmt: skip
            if schedule.placement.copies == self.placement.copies and (found := self.run(schedule)) is not None:
                yield found


def search_sliced(
    task: SlicedTask, steps: float, seed: int, stopped: Callable[[Timeline | None], bool]
) -> tuple[Timeline | None, Timeline | None]:
    """The best schedule that is found within `steps` simulations, and the best registered one; None if none fits.

    `stopped` gets the best one, and ends the search by returning True.
    """
    registered = min(task.registered(), key=lambda timeline: timeline.makespan, default=None)
    best, random, bound = registered, Random(seed), task.bound
    lags, value = list[Lags](), float("inf")
    for start in _starts(task.problem):
        if steps <= 0 or stopped(best):
            break
        steps -= 1
        found = task.run(task.write(start))
        if found is not None and found.makespan < value:
            lags, value = start, found.makespan
            best = found if best is None or value < best.makespan else best
    while lags and steps > 0 and best is not None and best.makespan > bound * AT_BOUND and not stopped(best):
        steps -= 1
        changed = _change(lags, random, task.problem)
        found = task.run(task.write(changed))
        if found is not None and found.makespan <= value:
            lags, value = changed, found.makespan
            best = found if value < best.makespan else best
    return best, registered


def _starts(problem: Problem) -> Iterator[list[Lags]]:
    """The lags with which the search begins, those with the least memory first."""
    n, last = problem.num_slices, problem.num_ranks - 1
    inside = (problem.stages_per_rank - 1) * len(groups(problem)[0]) * n + n - 1
    for behind in (1, 2):
        for extra in (0, n, 2 * n):
            for put_off in (None, 0, 1, last):
                warmups = [inside + behind * (last - rank) + min(extra, last - rank) for rank in range(last + 1)]
                yield [
                    Lags(warmup, None if put_off is None else put_off and put_off + warmups[0] - warmup)
                    for warmup in warmups
                ]


def _change(lags: list[Lags], random: Random, problem: Problem) -> list[Lags]:
    """Other lags of one rank, or of one rank and those after it."""
    changed, rank = list(lags), random.randrange(len(lags))
    by = random.choice((-1, 1)) * random.choice((1, 1, 1, 2, problem.num_slices))
    is_warmup, alone = random.random() < 0.5, random.random() < 0.7
    for one in range(rank, rank + 1 if alone else len(lags)):
        warmup, put_off = changed[one]
        if is_warmup or put_off is None:
            changed[one] = Lags(max(0, warmup + by), put_off)
        else:
            changed[one] = Lags(warmup, max(0, put_off + by))
    return changed
