"""Choose the F of a schedule that are checkpointed: as little recomputation as keeps each rank within its memory.

The order of a row is given, so marks change its memory levels by known amounts. Its steps are visited in order. Where
the level is over the limit, an F whose activations are there is marked: the one that saves the most memory for its
recomputation, and of several the one whose backward comes last, since it also helps the steps that follow. Then marks
that are not needed any more are removed. With equal F no set of fewer marks fits, as a test finds by trying all of
them. Levels of sharded stages and of copies also depend on times, so the result is simulated, and what is still over
the limit is marked in another round.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import NamedTuple

from zeropipe.core.action import OFFLOAD, B, F, I
from zeropipe.core.packed import NO_MARKS, is_joined, kind_of, microbatch_of, stage_of
from zeropipe.core.schedule import Schedule, require_schedule
from zeropipe.core.timeline import ROUNDING, Timeline
from zeropipe.core.units import size_text
from zeropipe.errors import ConfigError
from zeropipe.sim.costs import Costs, require_stage_costs
from zeropipe.sim.simulate import simulate
from zeropipe.sim.slice_costs import SliceCosts

Key = tuple[int, int]  # stage, and microbatch as in a code


class Lifetime(NamedTuple):
    """The activations of an F that could be checkpointed, from its step to that of its backward."""

    key: Key
    forward: int
    backward: int
    saved: float  # memory
    added: float  # memory that its backward needs more while it runs
    recompute: float  # time

    def effect(self, step: int) -> float:
        """The memory that a mark saves while a step runs."""
        return self.saved - (self.added if step == self.backward else 0.0)

    @property
    def priority(self) -> tuple[float, int]:
        """The lifetimes with the highest one are marked first."""
        return (self.saved / self.recompute if self.recompute else inf, self.backward)


def with_checkpointing(schedule: Schedule, costs: Costs | None = None) -> Schedule:
    """The schedule with as few F checkpointed as keep each rank within `costs.memory_limit`; other marks are removed.

    `costs.checkpointed_activation` is what a checkpointed F keeps, `costs.recompute` the time that its backward takes
    more. ConfigError if a rank needs more with all of its F checkpointed.
    """
    require_schedule(schedule)
    costs = require_stage_costs(costs)
    if costs.memory_limit is None:
        raise ConfigError("with_checkpointing has no limit to keep: set memory_limit in the costs")
    limit = costs.memory_limit * ROUNDING
    plain = replace(schedule, checkpointed=NO_MARKS)
    chosen = _choose(plain, costs, limit)
    marked = replace(plain, checkpointed=chosen)
    return marked if schedule.rebuild is None else replace(marked, rebuild=partial(_rebuild, schedule.rebuild, costs))


def _rebuild(again: Callable[[int], Schedule], costs: Costs, num_microbatches: int) -> Schedule:
    """The same for another number of microbatches."""
    return with_checkpointing(again(num_microbatches), costs)


def _choose(plain: Schedule, costs: Costs, limit: float) -> frozenset[Key]:
    """The marks of all ranks; ConfigError if all F that can be marked are not enough."""
    lifetimes = _Lifetimes(plain, costs)
    every = frozenset(lifetime.key for rank in range(plain.num_ranks) for lifetime in lifetimes.of(rank))
    chosen: frozenset[Key] = NO_MARKS
    while True:
        timeline = simulate(replace(plain, checkpointed=chosen), costs)
        over = [rank for rank, peak in enumerate(timeline.peak_memory) if peak > limit]
        if not over:
            return chosen
        if not chosen:
            _require_fit(plain, costs, every, limit)
        more: set[Key] = set()
        for rank in over:
            others = [lifetime for lifetime in lifetimes.of(rank) if lifetime.key not in chosen]
            more |= {lifetime.key for lifetime in _mark(*_levels(timeline, rank), others, limit)}
        chosen = chosen | more if more else every  # which is known to fit


def _require_fit(plain: Schedule, costs: Costs, every: frozenset[Key], limit: float) -> None:
    peaks = simulate(replace(plain, checkpointed=every), costs).peak_memory
    for rank, peak in enumerate(peaks):
        if peak > limit:
            if not every:
                raise ConfigError(
                    "no F saves memory by being checkpointed: set checkpointed_activation, what such an F keeps"
                )
            sizes = [size_text(size, costs.memory_unit) for size in (peak, costs.memory_limit or 0.0)]
            raise ConfigError(
                f"rank {rank} needs {sizes[0]} with all F checkpointed that can be, which is more than "
                f"memory_limit={sizes[1]}; use a schedule that keeps fewer microbatches, smaller ones, or more ranks"
            )


class _Lifetimes:
    """The lifetimes of each rank for which a mark saves memory. What is copied to the host is not checkpointed."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self._schedule = schedule
        num_stages = schedule.num_stages
        kept, less = (
            SliceCosts.of(schedule, one) for one in (costs, costs.with_all_checkpointed(num_stages))
        )  # by slice and stage
        self._saved = _differences(kept.memory()[0], less.memory()[0])
        self._recompute = {kind: _differences(less.times()[kind], kept.times()[kind]) for kind in (B, I)}
        self._added = {
            kind: _differences(less.rows(name), kept.rows(name))
            for kind, name in ((B, "workspace"), (I, "i_workspace"))
        }
        offloading = () if schedule.offloading is None else schedule.offloading.view
        self._copied = {(stage_of(code), microbatch_of(code)) for code in offloading if kind_of(code) == OFFLOAD}

    def of(self, rank: int) -> list[Lifetime]:
        """In the order of F."""
        forwards: dict[Key, int] = {}
        found: list[Lifetime] = []
        step = 0
        for code in self._schedule.packed.row(rank):
            kind, key = kind_of(code), (stage_of(code), microbatch_of(code))
            row = key[1] % self._schedule.num_slices * self._schedule.num_stages + key[0]
            if kind == F:
                forwards[key] = step
            elif kind in (B, I) and self._saved[row] > 0 and key not in self._copied:
                added, recompute = self._added[kind][row], self._recompute[kind][row]
                found.append(Lifetime(key, forwards[key], step, self._saved[row], added, recompute))
            step += not is_joined(code)
        return sorted(found, key=lambda lifetime: lifetime.forward)


def _differences(ones: Sequence[float], others: Sequence[float]) -> list[float]:
    return [one - other for one, other in zip(ones, others, strict=True)]


def _levels(timeline: Timeline, rank: int) -> tuple[list[float], list[float]]:
    """The memory during and after each step of a rank."""
    assert timeline.memory is not None
    entries = timeline.schedule.packed.entries(rank, *timeline.memory)
    steps = [(during, after) for code, during, after in entries if not is_joined(code)]
    return [during for during, _ in steps], [after for _, after in steps]


def _mark(during: list[float], after: list[float], lifetimes: Sequence[Lifetime], limit: float) -> list[Lifetime]:
    """The lifetimes whose marks keep all steps within the limit. Changes the levels."""
    marked = _sweep(during, after, lifetimes, limit)
    if marked is None:  # a mark also adds to the memory of its backward: mark all, and remove what is not needed
        marked = list(lifetimes)
    needed = sorted(marked, key=lambda lifetime: -lifetime.recompute)
    num_before = -1
    while len(needed) != num_before:  # what is removed may make room for the backward of another one
        num_before = len(needed)
        needed = [lifetime for lifetime in needed if not _unmark(during, after, lifetime, limit)]
    return needed


def _unmark(during: list[float], after: list[float], lifetime: Lifetime, limit: float) -> bool:
    """Unmark a lifetime if all steps stay within the limit without."""
    _change(during, after, lifetime, 1)
    fits = max(*during[lifetime.forward : lifetime.backward + 1], *after[lifetime.forward : lifetime.backward]) <= limit
    if not fits:
        _change(during, after, lifetime, -1)
    return fits


def _sweep(
    during: list[float], after: list[float], lifetimes: Sequence[Lifetime], limit: float
) -> list[Lifetime] | None:
    """Mark lifetimes where a step is over the limit; None, with all of them marked, if the best ones do not suffice."""
    starting: dict[int, list[Lifetime]] = defaultdict(list)
    for lifetime in lifetimes:
        starting[lifetime.forward].append(lifetime)
    marked: list[Lifetime] = []
    there: list[Lifetime] = []
    for step in range(len(during)):
        there += starting[step]
        while max(during[step], after[step]) > limit:
            useful = [lifetime for lifetime in there if lifetime.effect(step) > 0]
            if not useful:
                for lifetime in set(lifetimes).difference(marked):
                    _change(during, after, lifetime, -1)
                return None
            best = max(useful, key=lambda lifetime: lifetime.priority)
            there.remove(best)
            marked.append(best)
            _change(during, after, best, -1)
        there = [lifetime for lifetime in there if lifetime.backward > step]
    return marked


def _change(during: list[float], after: list[float], lifetime: Lifetime, sign: int) -> None:
    """Unmark a lifetime (sign 1), or mark it (-1)."""
    for step in range(lifetime.forward, lifetime.backward + 1):
        during[step] += sign * lifetime.effect(step)
    for step in range(lifetime.forward, lifetime.backward):
        after[step] += sign * lifetime.saved
