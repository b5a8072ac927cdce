"""Search schedules that save memory where they must: F that are checkpointed, or activations copied to the host.

Orders are searched for the costs as they are, with larger limits too, for those with everything saved, and for costs
with so little memory that their bound holds for every choice. In the best of them, and in the registered schedules, as
little is saved as keeps the limit. Then other F of the best one are checkpointed, as long as it becomes faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from time import monotonic

from zeropipe.core.placement import Placement, Problem
from zeropipe.core.schedule import Schedule
from zeropipe.core.timeline import ROUNDING, Timeline
from zeropipe.errors import ConfigError, ZeropipeError
from zeropipe.searching.bounds.lower_bound import lower_bound
from zeropipe.searching.candidates.registered import registered_schedules
from zeropipe.searching.result import SearchResult
from zeropipe.searching.task import SearchTask
from zeropipe.sim.checkpointing import with_checkpointing
from zeropipe.sim.costs import Costs
from zeropipe.sim.offload import with_offload
from zeropipe.sim.simulate import simulate

MAX_MOVES = 10_000  # of marks, if the time allows them
LIMITS = (1.0, 1.5, 2.0)  # over the limit, with which orders are searched


@dataclass(frozen=True)
class MemorySaving:
    """A way to save memory, and the costs for which orders are searched: the last have a bound that holds for all."""

    name: str
    apply: Callable[[Schedule], Schedule]
    limit: float
    searched: tuple[Costs, ...]


def create_memory_saving(checkpointing: bool, offload: bool, costs: Costs, num_stages: int) -> MemorySaving | None:
    """The way that the arguments of a search ask for; None for none, ConfigError for both or without a limit."""
    if not (checkpointing or offload):
        return None
    if checkpointing and offload:
        raise ConfigError("checkpointing and offload both save activations: use one of them")
    name, limit = "checkpointing" if checkpointing else "offload", costs.memory_limit
    if limit is None:
        raise ConfigError(f"{name} without a limit to keep: set memory_limit in the costs, or leave it out")
    plain = [replace(costs, memory_limit=factor * limit) for factor in LIMITS]
    if offload:
        return MemorySaving(
            "activations copied to the host", lambda schedule: with_offload(schedule, costs, "fit"), limit,
            (*plain, replace(costs, memory_limit=None)),
        )  # fmt: skip
    full = costs.with_all_checkpointed(num_stages)
    kept, less = (one.column("activation", num_stages) for one in (costs, full))
    least = replace(costs, activation=list(map(min, kept, less)), workspace=0.0, i_workspace=None)
    return MemorySaving(
        "some F checkpointed", lambda schedule: with_checkpointing(schedule, costs), limit, (*plain, full, least)
    )  # fmt: skip


def search_saving_memory(
    saving: MemorySaving, search: Callable[[Costs, float], SearchResult], problem: Problem,
    placements: Sequence[Placement], *, seconds: float, steps: int | None, seed: int,
) -> SearchResult:  # fmt: skip
    """The best schedule that saves as little as keeps the limit. `search` searches for costs and seconds."""
    begin, costs = monotonic(), saving.searched[0]
    until = begin + seconds if steps is None else float("inf")
    results: list[SearchResult] = []
    for index, one in enumerate(saving.searched):
        share = (seconds - (monotonic() - begin)) / (len(saving.searched) + 1 - index)
        try:
            results.append(search(one, max(0.0, share)))
        except ZeropipeError:
            if index == len(saving.searched) - 1:
                raise
            continue  # nothing fits with these costs
        if results[-1].interrupted:
            break
    registered = [
        timeline
        for placement in placements
        for schedule in registered_schedules(SearchTask(problem, placement, costs, minimizes_span=False))
        for timeline in _apply(saving, schedule, costs)
    ]
    found = [*registered, *(timeline for one in results for timeline in _apply(saving, one.schedule, costs))]
    if not found:
        raise ConfigError(
            f"no schedule that was found keeps the limit with {saving.name}; raise memory_limit, or use more ranks"
        )
    best = min(found, key=lambda timeline: timeline.makespan)
    if best.schedule.checkpointed and not results[-1].interrupted:
        best = _move_marks(best, costs, saving.limit, Random(seed), MAX_MOVES if steps is None else steps, until)
    least = saving.searched[-1]
    bound = min(lower_bound(SearchTask(problem, one, least, minimizes_span=False)) for one in placements)
    return replace(
        results[-1], schedule=best.schedule, timeline=best, bound=bound, memory_saving=saving.name,
        registered=min(registered, key=lambda timeline: timeline.makespan, default=None), seconds=monotonic() - begin,
    )  # fmt: skip


def _move_marks(
    best: Timeline, costs: Costs, limit: float, random: Random, steps: int, until: float
) -> Timeline:  # fmt: skip
    """The schedule with other F checkpointed, one at a time, as long as it is as fast and keeps the limit."""
    schedule, stages = best.schedule, best.schedule.placement.stages_of
    by_rank = [
        [(stage, number) for stage in stages(rank) for number in range(schedule.num_microbatches)]
        for rank in range(schedule.num_ranks)
    ]
    for _ in range(steps):
        if monotonic() >= until:
            break
        marks = best.schedule.checkpointed
        mark = random.choice(sorted(marks))
        keys = by_rank[schedule.placement.rank_of(mark[0])]
        other = random.choice(keys)  # a marked one: there is one mark less
        moved = replace(best.schedule, checkpointed=marks - {mark} | ({other} - marks))
        timeline = simulate(moved, costs)
        if timeline.makespan <= best.makespan and max(timeline.peak_memory) <= limit * ROUNDING:
            best = timeline
            if not moved.checkpointed:
                break
    return best


def _apply(saving: MemorySaving, schedule: Schedule, costs: Costs) -> Iterator[Timeline]:
    """The simulation of the schedule with as little saved as keeps the limit; nothing if none does."""
    try:
        timeline = simulate(saving.apply(schedule), costs)
    except ZeropipeError:
        return
    if max(timeline.peak_memory) <= saving.limit * ROUNDING:
        yield timeline
