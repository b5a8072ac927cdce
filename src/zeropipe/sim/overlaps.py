"""Make Overlaps of neighbouring forwards and backwards of any schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

from zeropipe.core.action import BACKWARD, Action, Kind, Overlap, Step
from zeropipe.core.schedule import Schedule, require_schedule
from zeropipe.core.timeline import Timeline
from zeropipe.core.waits import find_ends, ready_time
from zeropipe.errors import ConfigError
from zeropipe.sim.costs import Costs, require_stage_costs
from zeropipe.sim.simulate import simulate


def with_overlaps(schedule: Schedule, costs: Costs | None = None) -> Schedule:
    """The schedule whose neighbouring F and B (or I) of different microbatches are Overlaps.

    Two of them are joined if the inputs of both exist when the first one starts, in the simulation with these costs. So
    no step waits for a later one. ConfigError for a schedule with OFFLOAD or checkpointed F: choose them later.
    """
    require_schedule(schedule)
    if schedule.offloading is not None:
        raise ConfigError(f"{schedule.name} has OFFLOAD and RELOAD: make Overlaps first, then zp.with_offload")
    if schedule.checkpointed:
        raise ConfigError(f"{schedule.name} has checkpointed F: make Overlaps first, then zp.with_checkpointing")
    timeline = simulate(schedule, require_stage_costs(costs))
    ends = find_ends(timeline)
    rows = [list(_join(timeline, rank, ends)) for rank in range(schedule.num_ranks)]
    joined = Schedule.of(schedule.problem, schedule.placement, rows, schedule.name)
    return joined if schedule.rebuild is None else replace(joined, rebuild=partial(_rebuild, schedule.rebuild, costs))


def _rebuild(again: Callable[[int], Schedule], costs: Costs | None, num_microbatches: int) -> Schedule:
    return with_overlaps(again(num_microbatches), costs)


def _join(timeline: Timeline, rank: int, ends: Mapping[Action, float]) -> Iterator[Step]:
    steps = list(timeline.steps(rank))
    at = 0
    while at < len(steps):
        step = steps[at]
        if len(step) == 2:
            yield Overlap(step[0].action, step[1].action)
        elif at + 1 < len(steps) and len(steps[at + 1]) == 1:
            first, second = step[0], steps[at + 1][0]
            if _is_pair(first.action, second.action) and ready_time(second.action, ends, timeline) <= first.start:
                at += 1
                forward, backward = sorted((first.action, second.action), key=lambda action: action.kind is not Kind.F)
                yield Overlap(forward, backward)
            else:
                yield first.action
        else:
            yield step[0].action
        at += 1


def _is_pair(one: Action, other: Action) -> bool:
    kinds = one.kind, other.kind
    return Kind.F in kinds and any(kind in BACKWARD for kind in kinds)
