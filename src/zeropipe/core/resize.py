"""The same schedule for another number of microbatches."""

from __future__ import annotations

from dataclasses import replace

from zeropipe.core.action import Action, Kind, Overlap, Step, actions_of
from zeropipe.core.placement import Placement
from zeropipe.core.schedule import Schedule
from zeropipe.errors import ConfigError


def resized(schedule: Schedule, num_microbatches: int) -> Schedule:
    """`schedule` for `num_microbatches`, with every stage on the ranks it is on now.

    A schedule that came from `build` is built again. Where its algorithm has no order for that number, the next larger
    one is built and the microbatches too many are left out: what remains of a valid order is a valid order. Any other
    schedule is repeated as often as needed.
    """
    if num_microbatches < 1:
        raise ConfigError(f"num_microbatches={num_microbatches}: a step has at least 1 microbatch")
    if num_microbatches == schedule.num_microbatches:
        return schedule
    if schedule.rebuild is not None:
        # no algorithm wants more than a few microbatches per rank, or a multiple of more
        for size in range(num_microbatches, num_microbatches + 4 * schedule.num_stages + 1):
            try:
                built = schedule.rebuild(size)
            except ConfigError:
                continue
            if built.placement.copies == schedule.placement.copies:
                return trimmed(built, num_microbatches)
    return trimmed(repeated(schedule, -(-num_microbatches // schedule.num_microbatches)), num_microbatches)


def trimmed(schedule: Schedule, num_microbatches: int) -> Schedule:
    """The schedule without its last microbatches; of two copies of the model, each loses its share."""
    if num_microbatches == schedule.num_microbatches:
        return schedule
    first = schedule.second_from
    kept = min(first, -(-num_microbatches * first // schedule.num_microbatches))
    if num_microbatches - kept > schedule.num_microbatches - first:
        kept = num_microbatches - (schedule.num_microbatches - first)
    numbers = {old: old for old in range(kept)}
    numbers |= {first + more: kept + more for more in range(num_microbatches - kept)}
    return _renumbered(schedule, [numbers], num_microbatches, kept)


def repeated(schedule: Schedule, rounds: int) -> Schedule:
    """The schedule `rounds` times, one after the other, with new microbatches each time."""
    first, total = schedule.second_from, schedule.num_microbatches
    numbers = [
        {old: turn * first + old for old in range(first)}
        | {old: rounds * first + turn * (total - first) + old - first for old in range(first, total)}
        for turn in range(rounds)
    ]
    return _renumbered(schedule, numbers, rounds * total, rounds * first)


def _renumbered(schedule: Schedule, numbers: list[dict[int, int]], num_microbatches: int, second_from: int) -> Schedule:
    """The rows once for each table of new numbers; actions of microbatches without a number are left out."""
    placement = schedule.placement
    if placement.second_from is not None:
        placement = Placement(placement.copies, second_from, placement.name)
    rows = [
        [new for table in numbers for step in row if (new := _numbered(step, table)) is not None]
        for row in schedule.rows
    ]
    has_weights = any(action.kind is Kind.W for row in rows for action in actions_of(row))
    parts = schedule.problem.num_weight_parts if has_weights else 1
    problem = replace(schedule.problem, num_microbatches=num_microbatches, num_weight_parts=parts)
    return replace(Schedule.of(problem, placement, rows, schedule.name), rebuild=schedule.rebuild)


def _numbered(step: Step, numbers: dict[int, int]) -> Step | None:
    if isinstance(step, Overlap):
        forward, backward = (_numbered(action, numbers) for action in step)
        if isinstance(forward, Action) and isinstance(backward, Action):
            return Overlap(forward, backward)
        return forward or backward
    number = numbers.get(step.microbatch)
    return None if number is None else step._replace(microbatch=number)
