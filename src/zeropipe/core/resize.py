"""The same schedule for another number of microbatches."""

from __future__ import annotations

from dataclasses import replace

from zeropipe.core.action import Action, Kind, Overlap, Step, actions_of
from zeropipe.core.placement import Placement
from zeropipe.core.schedule import Schedule
from zeropipe.errors import ConfigError


def resize(schedule: Schedule, num_microbatches: int) -> Schedule:
    """`schedule` for `num_microbatches`, with every stage on its present ranks.

    A schedule of `build` is built again. If its algorithm has no order for that number, the next larger one is built
    and the extra microbatches are removed: what remains of a valid order is valid. Other schedules are repeated.
    """
    if num_microbatches < 1:
        raise ConfigError(f"num_microbatches={num_microbatches}: must be a positive integer")
    if num_microbatches == schedule.num_microbatches:
        return schedule
    if schedule.rebuild is not None:
        # no algorithm requires more than a few microbatches per rank, or a multiple of more
        for size in range(num_microbatches, num_microbatches + 4 * schedule.num_stages + 1):
            try:
                built = schedule.rebuild(size)
            except ConfigError:
                continue
            if built.placement.copies == schedule.placement.copies:
                return trim(built, num_microbatches)
    return trim(repeat(schedule, -(-num_microbatches // schedule.num_microbatches)), num_microbatches)


def trim(schedule: Schedule, num_microbatches: int) -> Schedule:
    """The schedule without its last microbatches; two copies of the model lose the same fraction of theirs."""
    if num_microbatches == schedule.num_microbatches:
        return schedule
    first = schedule.second_from
    kept = min(first, -(-num_microbatches * first // schedule.num_microbatches))
    if num_microbatches - kept > schedule.num_microbatches - first:
        kept = num_microbatches - (schedule.num_microbatches - first)
    numbers = {old: old for old in range(kept)}
    numbers |= {first + extra: kept + extra for extra in range(num_microbatches - kept)}
    return _renumber(schedule, [numbers], num_microbatches, kept)


def repeat(schedule: Schedule, rounds: int) -> Schedule:
    """The schedule `rounds` times in sequence, with new microbatches in each round."""
    first, total = schedule.second_from, schedule.num_microbatches
    numbers = [
        {old: n * first + old for old in range(first)}
        | {old: rounds * first + n * (total - first) + old - first for old in range(first, total)}
        for n in range(rounds)
    ]
    return _renumber(schedule, numbers, rounds * total, rounds * first)


def _renumber(schedule: Schedule, numbers: list[dict[int, int]], num_microbatches: int, second_from: int) -> Schedule:
    """The rows once for each table old -> new microbatch, without actions of microbatches that have no new number."""
    placement = schedule.placement
    if placement.second_from is not None:
        placement = Placement(placement.copies, second_from, placement.name)
    rows = [
        [new for table in numbers for step in row if (new := _renumber_step(step, table)) is not None]
        for row in schedule.rows
    ]
    has_weights = any(action.kind is Kind.W for row in rows for action in actions_of(row))
    parts = schedule.problem.num_weight_parts if has_weights else 1
    problem = replace(schedule.problem, num_microbatches=num_microbatches, num_weight_parts=parts)
    return replace(Schedule.of(problem, placement, rows, schedule.name), rebuild=schedule.rebuild)


def _renumber_step(step: Step, numbers: dict[int, int]) -> Step | None:
    if isinstance(step, Overlap):
        forward, backward = (_renumber_step(action, numbers) for action in step)
        if isinstance(forward, Action) and isinstance(backward, Action):
            return Overlap(forward, backward)
        return forward or backward
    number = numbers.get(step.microbatch)
    return None if number is None else step._replace(microbatch=number)
